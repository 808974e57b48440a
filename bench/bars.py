"""A line of the speed table: quartiles of repeated measurements, and the bar they have to meet.

Whatever is compared is run in turns, so that another program on the machine slows both.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Line:
    """One number of the table. ``bar`` is the least ratio, or the most of anything else.

    ``wrong`` counts wrong values in what was timed. Without ``bar`` a line is for information.
    """

    name: str
    unit: str
    quartiles: tuple[float, float, float]
    bar: float | None
    higher_is_better: bool
    wrong: int
    note: str = ""

    @property
    def verdict(self) -> str:
        """Says "ok" where the median meets the bar, "unsure" where only the better quartile does.

        "missed": not even that one. An empty text: there is no bar.
        """
        if self.bar is None:
            return ""
        _, median, _ = self.quartiles
        better = self.quartiles[2 if self.higher_is_better else 0]
        return "ok" if self._meets(median) else "unsure" if self._meets(better) else "missed"

    def _meets(self, value: float) -> bool:
        assert self.bar is not None
        return value >= self.bar if self.higher_is_better else value <= self.bar

    def without_bar(self) -> "Line":
        return replace(self, bar=None)

    def __str__(self) -> str:
        low, median, high = (f"{value:8.2f}" for value in self.quartiles)
        bar = ""
        if self.bar is not None:
            bar = f"{'>=' if self.higher_is_better else '<='} {self.bar:g} {self.verdict}"
        wrong = f"  {self.wrong} WRONG VALUES" if self.wrong else ""
        return f"{self.name:44} {low} {median} {high} {self.unit:6} {bar:16} {self.note}{wrong}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


@dataclass(frozen=True)
class Sample:
    """Seconds by the clock, and seconds that all threads of this process computed."""

    wall: float
    cpu: float


def sample(run: Callable[[], object]) -> Sample:
    """Times one call. Freeing its result is not part of the time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    taken = Sample(time.perf_counter() - wall, time.process_time() - cpu)
    del result
    return taken


def in_turns(runs: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Calls every run once a round, each round starting with another one."""
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for order in _rotations(list(runs), rounds):
        for name in order:
            samples[name].append(runs[name]())
    return samples


def _rotations(names: list[str], rounds: int) -> Iterator[list[str]]:
    for k in range(rounds):
        start = k % len(names)
        yield names[start:] + names[:start]


def ratios(over: list[Sample], under: list[Sample]) -> list[float]:
    """Divides times round by round."""
    return [a.wall / b.wall for a, b in zip(over, under, strict=True)]


def median_ms(samples: list[Sample]) -> float:
    return statistics.median(s.wall for s in samples) * 1e3


def median_cpu(samples: list[Sample]) -> float:
    return statistics.median(s.cpu for s in samples)
