"""Speed on this machine, as ratios of things measured in turns in one run, against fixed bars.

    python bench/speed.py --json speed.json
    python bench/speed.py limit gloo

Prints the lower quartile, the median and the upper quartile of each line. "ok": the median meets
the bar; "unsure": only the better quartile does, as happens beside other programs; "missed": not
even that one. Results are checked, too. Exit codes: 0 fine, 1 wrong values, 2 bad arguments, 3 a
bar was missed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from bars import Line
from coalesced import coalesced_lines
from gloo import Size, gloo_lines
from latency import latency_lines
from limits import limit_lines
from sections import run_sections


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The bars hold for FULL; TINY shows that every line works."""

    nbytes: int
    ntensors: int
    rounds: int
    calls: int
    idle_s: float
    gloo: list[Size]


FULL = Sizes(64 << 20, 3000, 21, 2000, 1.0, [Size(4, 20, 51, 20), Size(64 << 20, 3, 11, 1)])
TINY = Sizes(64 << 10, 10, 3, 20, 0.05, [Size(4, 20, 2, 2), Size(4096, 3, 2, 1)])

SECTIONS: dict[str, Callable[[Sizes], list[Line]]] = {
    "limit": lambda s: limit_lines(s.nbytes, s.rounds),
    "coalesced": lambda s: coalesced_lines(s.ntensors, s.rounds),
    "latency": lambda s: latency_lines(s.calls, s.idle_s),
    "gloo": lambda s: gloo_lines(s.gloo),
}


def main(argv: list[str] | None = None) -> int:
    description = "Compares pyparallel on virtual devices with what memory allows and with gloo."
    return run_sections("bench/speed.py", description, SECTIONS, FULL, TINY, argv)


if __name__ == "__main__":
    sys.exit(main())
