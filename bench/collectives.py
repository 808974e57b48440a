"""Microbenchmark of the collectives, in the manner of nccl-tests.

    python bench/collectives.py all --device cpu -g 4 -b 4 -e 64M -f 4 --json out.json
    python bench/collectives.py all_reduce --device cuda -b 1K -e 1G -f 2 --algorithm all

It calls the compiled core with preallocated buffers, so that neither allocation nor the Python
layer is part of the times. Every result is compared with its closed form after the outputs were
poisoned; guards around the buffers find writes outside of them.
"""

import json
import signal
import sys
from pathlib import Path

from operations import Case, Operation, Shape
from options import Options, parse
from origin import facts
from ranks import Ranks
from table import Row, print_header, print_row, print_section, print_summary
from timing import measure


class CaseFailed(Exception):
    """A measurement could not be made. Says which one and why."""


def count_wrong(case: Case, ranks: Ranks, checks: int) -> int | None:
    """Runs the case on fresh inputs and poisoned outputs; None when no check was asked for."""
    wrong = 0
    for _ in range(checks):
        case.reset()
        ranks.synchronize()
        case.run()
        ranks.synchronize()
        wrong += case.wrong()
    return wrong if checks else None


def bench_case(
    options: Options,
    ranks: Ranks,
    operation: Operation,
    algorithm: str,
    shape: Shape,
    in_place: bool,
) -> Row:
    build = operation.build_in_place if in_place else operation.build
    assert build is not None
    nbytes = shape.count * shape.dtype.itemsize
    try:
        case = build(ranks, shape, algorithm)
        timing = measure(case.run, ranks, options.iterations, options.warmup)
        wrong = count_wrong(case, ranks, options.checks)
    except (MemoryError, RuntimeError) as error:
        # torch calls it RuntimeError when the memory of the CPU is too small.
        reason = str(error).strip().partition("\n")[0] or "out of memory"
        raise CaseFailed(
            f"{operation.name}, {nbytes} bytes, {len(ranks)} ranks: {reason}"
        ) from error
    algbw = nbytes / timing.median_us / 1e3
    return Row(
        op=operation.name,
        algorithm=algorithm,
        nranks=len(ranks),
        bytes=nbytes,
        dtype=str(shape.dtype).removeprefix("torch."),
        time_us=round(timing.median_us, 3),
        algbw_gbps=round(algbw, 6),
        busbw_gbps=round(algbw * operation.busbw_factor(len(ranks)), 6),
        wrong=wrong,
        p99_us=round(timing.p99_us, 3),
        root=shape.root if operation.rooted else None,
        in_place=in_place,
    )


def bench(options: Options, ranks: Ranks) -> list[Row]:
    """Runs and prints everything that was asked for."""
    rows: list[Row] = []
    for operation, algorithm in options.plan:
        print_section(operation, algorithm)
        for dtype in options.dtypes:
            for root in options.roots if operation.rooted else [0]:
                for size in options.sizes:
                    if size > operation.limit(algorithm):
                        continue
                    shape = Shape(root, size // dtype.itemsize, dtype, options.unalign)
                    row = bench_case(options, ranks, operation, algorithm, shape, in_place=False)
                    rows.append(row)
                    in_place = None
                    if operation.build_in_place:
                        in_place = bench_case(
                            options, ranks, operation, algorithm, shape, in_place=True
                        )
                        rows.append(in_place)
                    print_row(row, in_place, operation, dtype)
    return rows


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    origin = facts("bench/collectives.py", argv)
    try:
        ranks = Ranks(options.device, options.nranks, options.timeout_s)
        print_header(options, ranks, origin)
        rows = bench(options, ranks)
    except (ValueError, RuntimeError, CaseFailed) as error:
        print(f"bench/collectives.py: error: {error}", file=sys.stderr)
        return 2
    print_summary(rows)
    if options.json:
        write_json(options.json, [row.as_json() for row in rows])
        write_json(options.json.with_suffix(".meta.json"), origin)
    return 1 if any(row.wrong for row in rows) else 0


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends it without a traceback
    sys.exit(main())
