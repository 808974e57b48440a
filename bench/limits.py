"""The collectives against what memory allows.

The limit is the better of memcpy and streaming stores for one read of each input and one write of
each output: the same buffers, all cores, no schedule, no arithmetic (``_C.move_at_limit``). The
ratio is the limit's time divided by ours, 1 being as fast as memory is.
"""

import functools

import torch
from bars import Line, Sample, in_turns, median_cpu, median_ms, quartiles, ratios, sample
from operations import OPERATIONS, Case, Shape
from ranks import Ranks

from pyparallel import _C

# operation, dtype, algorithm, least ratio (None: for information)
CASES: list[tuple[str, torch.dtype, str, float | None]] = [
    ("broadcast", torch.float32, "auto", 0.85),
    ("reduce_add", torch.float32, "auto", 0.85),
    ("all_reduce", torch.float32, "auto", 0.85),
    ("reduce_add", torch.float16, "auto", 0.7),
    ("reduce_add", torch.bfloat16, "auto", 0.7),
    # Flag-ordered algorithms are on the host to be tested; here 0.4 would be good.
    ("broadcast", torch.float32, "chain", None),
    ("broadcast", torch.float32, "two_hop_flags", None),
    ("reduce_add", torch.float32, "chain", None),
    ("all_reduce", torch.float32, "ring", None),
]


def limit_lines(nbytes: int, rounds: int) -> list[Line]:
    ranks = Ranks("cpu", 4, timeout_s=60)
    return [_line(ranks, nbytes, rounds, *case) for case in CASES]


def _line(
    ranks: Ranks,
    nbytes: int,
    rounds: int,
    name: str,
    dtype: torch.dtype,
    algorithm: str,
    bar: float | None,
) -> Line:
    shape = Shape(root=0, count=nbytes // dtype.itemsize, dtype=dtype, unalign=0)
    case = OPERATIONS[name].build(ranks, shape, algorithm)
    limits = {
        kind: functools.partial(_move, case, kind == "streaming", nbytes)
        for kind in ("memcpy", "streaming")
    }
    wrong = sum(_wrong_moves(case, move) for move in limits.values())
    case.reset()
    case.run()
    wrong += case.wrong()
    runs = {kind: functools.partial(sample, move) for kind, move in limits.items()}
    samples = in_turns({**runs, "ours": functools.partial(sample, case.run)}, rounds)
    ours = samples.pop("ours")
    best = min(samples, key=lambda kind: median_ms(samples[kind]))
    dtype_name = str(dtype).removeprefix("torch.")
    return Line(
        name=f"limit / {name} {algorithm} {dtype_name}",
        unit="x",
        quartiles=quartiles(ratios(samples[best], ours)),
        bar=bar,
        higher_is_better=True,
        wrong=wrong,
        note=_note(best, samples[best], ours),
    )


def _note(kind: str, limit: list[Sample], ours: list[Sample]) -> str:
    # Other programs disturb CPU time less than the clock.
    cpu = median_cpu(limit) / max(median_cpu(ours), 1e-9)
    return f"{kind} {median_ms(limit):.2f} ms, ours {median_ms(ours):.2f} ms; CPU time {cpu:.2f} x"


def _move(case: Case, streaming: bool, nbytes: int) -> None:
    _C.move_at_limit(
        streaming, [b.pointer for b in case.inputs], [b.pointer for b in case.outputs], nbytes
    )


def _wrong_moves(case: Case, move: functools.partial[None]) -> int:
    """Counts bytes that show that the limit did not read every input and write every output."""
    case.reset()
    words = [b.body.view(torch.int8) for b in case.inputs]
    expected = functools.reduce(torch.bitwise_xor, words)
    move()
    return sum(int((b.body.view(torch.int8) != expected).sum()) for b in case.outputs)
