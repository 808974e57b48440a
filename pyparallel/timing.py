"""Times of calls of one kind, and which way of running them they speak for."""

from statistics import median
from typing import Literal

Way = Literal["threads", "sequential"]

# Of each way. They take turns, so that a load that comes and goes meets both, by some calls in a
# row: the first of them, which is not counted, finds threads and CPUs as the other way left them.
_SAMPLES = 5
_IN_A_ROW = 3
# The other way must be faster by this factor, or two equal ones would change places for ever.
_HYSTERESIS = 0.9
# The machine and the model may change: measure again after as many calls, which costs less than 1 %
# even where the slower way takes twice as long.
_CALLS_BETWEEN = 2000


class Timing:
    """Says which way the next call goes, from how long the calls before took.

    Args:
        may_draw: See the attribute.

    Attributes:
        may_draw: Whether a module is known to draw random numbers; then nothing is measured.
        draws: Whether one was seen to draw. Set by the user of the class.
        decided: Whether it is not measuring.
    """

    def __init__(self, may_draw: bool) -> None:
        self.may_draw = may_draw
        self.draws = False
        self.decided = False
        self._choice: Way = "sequential"
        self._calls = 0
        self._seconds: dict[Way, list[float]] = {"threads": [], "sequential": []}

    def next_way(self) -> Way:
        """Returns how to run the next call."""
        if self.draws:
            return "sequential"
        if self.decided:
            return self._choice
        return "threads" if self._calls // _IN_A_ROW % 2 else "sequential"

    def add(self, way: Way, seconds: float) -> None:
        """Takes the time of a call."""
        first_in_row = self._calls % _IN_A_ROW == 0
        self._calls += 1
        if self.decided:
            if self._calls >= _CALLS_BETWEEN:
                self._calls, self.decided = 0, False
                self._seconds = {"threads": [], "sequential": []}
        elif not first_in_row:
            self._seconds[way].append(seconds)
            if all(len(times) >= _SAMPLES for times in self._seconds.values()):
                self._decide()

    def _decide(self) -> None:
        other: Way = "sequential" if self._choice == "threads" else "threads"
        if median(self._seconds[other]) < _HYSTERESIS * median(self._seconds[self._choice]):
            self._choice = other
        self._calls, self.decided = 0, True
