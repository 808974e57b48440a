"""Where the time of a training step goes on virtual devices, and when its sums run.

    python bench/step.py --json step.json
    python bench/step.py threads --trace out.json

The table is in milliseconds: forward; backward; the CPU time of the thread "pp-comm", which sums
gradients; how long backward waited for sums, which is part of it; and the whole step with SGD. Sums
that backward did not wait for were hidden behind the rest of it.

--trace writes a step of each mode for chrome://tracing or ui.perfetto.dev: the ranges of torch's
profiler, and a row "pp-comm". Sums start while backward runs. Which part of backward they overlap
depends on the mode, because torch's CPU engine has one queue, in which later operations come first.
After a sequential forward it runs rank after rank, the last one first, and no gradient is complete
before the first rank's turn. After a forward in threads the ranks that ran at once interleave: with
a CPU for each rank sums overlap with all of backward, with two CPUs and four ranks with the second
half.

Exit codes: 0 fine, 2 bad arguments.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from bars import quartiles
from models import perceptron
from origin import facts
from sums import cpu_seconds, sum_thread
from torch.profiler import record_function
from tracing import sees_all_threads, trace_events

import pyparallel
from pyparallel.gradient_bucket import GradientBucket

NRANKS = 4
MODES = ("threads", "sequential")
WARM_UP = 3
PARTS = ("forward", "backward", "sums", "wait", "step")


@dataclass(frozen=True)
class Sizes:
    """A perceptron. Sums below 64 KiB a bucket would not run on the thread."""

    layers: int
    width: int
    batch: int
    bucket_mib: float
    steps: int


FULL = Sizes(layers=12, width=1024, batch=256, bucket_mib=4, steps=25)
TINY = Sizes(layers=6, width=512, batch=64, bucket_mib=1, steps=2)


class Training:
    """Steps of one model in one mode of dispatch."""

    def __init__(self, mode: str, sizes: Sizes) -> None:
        torch.manual_seed(0)
        module = perceptron(sizes.layers, sizes.width)
        self._model = pyparallel.DataParallel(
            module,
            device_ids=pyparallel.virtual_devices(NRANKS),
            bucket_cap_mb=sizes.bucket_mib,
            dispatch=mode,
        )
        self._x = torch.randn(sizes.batch, sizes.width)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> dict[str, float]:
        """Returns the seconds of forward, of backward, and of both with the optimizer."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        with record_function("forward"):
            loss = self._model(self._x).square().sum()
        middle = time.perf_counter()
        with record_function("backward"):
            loss.backward()
        end = time.perf_counter()
        self._optimizer.step()
        whole = time.perf_counter() - start
        return {"forward": middle - start, "backward": end - middle, "step": whole}


def parts_of_steps(mode: str, sizes: Sizes) -> dict[str, tuple[float, float, float]]:
    """Returns the quartiles of each part, in seconds."""
    training = Training(mode, sizes)
    thread = sum_thread()
    waited = 0.0
    wait = GradientBucket.wait

    def timed_wait(bucket: GradientBucket) -> None:
        nonlocal waited
        start = time.perf_counter()
        wait(bucket)
        waited += time.perf_counter() - start

    parts: dict[str, list[float]] = defaultdict(list)
    with mock.patch.object(GradientBucket, "wait", timed_wait):
        for _ in range(sizes.steps):
            waited, summed = 0.0, cpu_seconds(thread)
            times = training.step()
            for part, seconds in times.items():
                parts[part].append(seconds)
            parts["sums"].append(cpu_seconds(thread) - summed)
            parts["wait"].append(waited)
    return {part: quartiles(parts[part]) for part in PARTS}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/step.py", description="Says where the time of a training step goes."
    )
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace there")
    args = parser.parse_args(argv)
    unknown = set(args.modes) - set(MODES)
    if unknown:
        parser.error(f"no such mode: {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    for flag in ("json", "trace"):
        file = getattr(args, flag)
        if file and not os.access(file.resolve().parent, os.W_OK):
            parser.error(f"--{flag} {file}: cannot write into {file.resolve().parent}")
    if args.trace and not sees_all_threads():
        parser.error(f"--trace: the profiler of torch {torch.__version__} cannot see all threads")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    torch.set_num_threads(1)  # torch's own threads would spin beside ours
    origin = facts("bench/step.py", argv)
    sizes = TINY if args.dry_run else FULL
    for name, value in {**origin, "sizes": sizes, "load": os.getloadavg()[0]}.items():
        print(f"# {name}: {value}")
    print("# median (lower quartile, upper quartile) in ms")
    print(f"#{'':11}" + "".join(f"{part:>26}" for part in PARTS))
    rows = []
    events: list[dict[str, object]] = []
    for mode in args.modes or MODES:
        parts = parts_of_steps(mode, sizes)
        rows.append({"mode": mode, **{f"{part}_s": values for part, values in parts.items()}})
        cells = [f"{m * 1e3:.2f} ({a * 1e3:.2f}, {b * 1e3:.2f})" for a, m, b in parts.values()]
        print(f"{mode:12}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
        if args.trace:
            events += trace_events(mode, Training(mode, sizes).step)
    if args.json:
        result = {"origin": origin, "dry_run": args.dry_run, "nranks": NRANKS, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.trace:
        args.trace.write_text(json.dumps({"traceEvents": events}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
