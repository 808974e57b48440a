"""Times one collective: warm-up, then iterations bounded in number and in seconds."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from ranks import Ranks

# For warm-up and for timing each, so that a whole table takes minutes at most on a slow machine.
BUDGET_S = 0.5
FEWEST = 3  # iterations that are timed whatever they cost


@dataclass(frozen=True)
class Timing:
    """Median and nearest-rank 99th percentile of one call, in microseconds."""

    median_us: float
    p99_us: float


def measure(run: Callable[[], None], ranks: Ranks, iterations: int, warmup: int) -> Timing:
    """Times ``run``, which launches one collective on all ranks.

    On virtual devices a call returns when its data have arrived, so each is timed by the clock. On
    GPUs each call stands between two events on every rank's stream; the slowest rank counts, and
    calls queue up behind each other as they do in training.
    """
    # The first call makes connections and touches memory: it only bounds how many follow.
    seconds = _seconds(run, ranks)
    for _ in range(min(warmup - 1, int(BUDGET_S / seconds))):
        seconds = _seconds(run, ranks)
    count = max(min(iterations, int(BUDGET_S / seconds)), min(iterations, FEWEST))
    on_gpus = ranks.devices[0].type == "cuda"
    times = sorted(
        _by_events(run, ranks, count) if on_gpus else [_seconds(run, ranks) for _ in range(count)]
    )
    return Timing(statistics.median(times) * 1e6, times[math.ceil(0.99 * count) - 1] * 1e6)


def _seconds(run: Callable[[], None], ranks: Ranks) -> float:
    start = time.perf_counter()
    run()
    if ranks.devices[0].type == "cuda":
        ranks.synchronize()
    return time.perf_counter() - start


def _by_events(run: Callable[[], None], ranks: Ranks, count: int) -> list[float]:
    def record() -> list[torch.cuda.Event]:
        events = [torch.cuda.Event(enable_timing=True) for _ in ranks.devices]
        for event, device in zip(events, ranks.devices, strict=True):
            event.record(torch.cuda.current_stream(device))
        return events

    marks = []
    for _ in range(count):
        starts = record()
        run()
        marks.append((starts, record()))
    ranks.synchronize()
    return [max(a.elapsed_time(b) for a, b in zip(*mark, strict=True)) / 1e3 for mark in marks]
