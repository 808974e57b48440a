"""When gradients are summed: the CPU clock of the core's thread "pp-comm" (Linux).

Looking at a clock disturbs nothing. Waiting for a sum would: one that somebody waits for gets all
cores.
"""

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

# Seconds between two looks at the clock, and how much the thread must have worked meanwhile: waking
# up takes less, and no sum does.
_INTERVAL = 0.0002
_WORK = 0.00002


def sum_thread() -> int:
    """The system's id of the thread, which the first queued sum starts."""
    for comm in Path("/proc/self/task").glob("*/comm"):
        if comm.read_text().strip() == "pp-comm":
            return int(comm.parent.name)
    raise RuntimeError("no sum was large enough to be queued, so there is no thread pp-comm")


def cpu_seconds(native_id: int) -> float:
    """The CPU time that a thread of this process has used so far."""
    # The clock of a thread, as pthread_getcpuclockid makes it.
    return time.clock_gettime((~native_id << 3) | 6)


class SumSpans:
    """Looks at the thread again and again: in which spans of time did it work?"""

    def __enter__(self) -> "SumSpans":
        self._id = sum_thread()
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._samples.append((time.perf_counter(), cpu_seconds(self._id)))

    def spans(self) -> list[tuple[float, float]]:
        """Start and end of each, by ``time.perf_counter``."""
        return spans_of(self._samples)


def spans_of(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Joins neighbouring looks between which the thread worked.

    Args:
        samples: Times, and the CPU time that was used until then.
    """
    spans: list[tuple[float, float]] = []
    for (start, used), (end, more) in pairwise(samples):
        if more - used < _WORK:
            continue
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return spans
