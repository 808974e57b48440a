"""Speed on this machine, as ratios of things measured in turns in one run, against fixed bars.

    python bench/speed.py --json speed.json
    python bench/speed.py limit gloo

Prints the lower quartile, the median and the upper quartile of each line. "ok": the median meets
the bar; "unsure": only the better quartile does, as happens beside other programs; "missed": not
even that one. Results are checked, too. Exit codes: 0 fine, 1 wrong values, 2 bad arguments, 3 a
bar was missed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from bars import Line
from coalesced import coalesced_lines
from gloo import Size, gloo_lines
from latency import latency_lines
from limits import limit_lines
from origin import facts


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


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/speed.py",
        description="Compares pyparallel on virtual devices with what memory allows and with gloo.",
        epilog="Exit codes: 0 fine, 1 wrong values, 2 bad arguments, 3 a bar was missed.",
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, no bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there, too")
    args = parser.parse_args(argv)
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(
            f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}"
        )
    if args.json and not os.access(args.json.resolve().parent, os.W_OK):
        parser.error(f"--json {args.json}: cannot write into {args.json.resolve().parent}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    torch.set_num_threads(1)  # it only prepares and checks; its threads would spin meanwhile
    origin = facts("bench/speed.py", argv)
    load = os.getloadavg()[0]
    for name, value in origin.items():
        print(f"# {name}: {value}")
    print(f"# load: {load:.1f}" + (", so the numbers are worth little" if load > 1 else ""))
    print(f"#{'':43} {'lower':>8} {'median':>8} {'upper':>8}")
    lines: list[Line] = []
    for name in args.sections or SECTIONS:
        for line in SECTIONS[name](TINY if args.dry_run else FULL):
            lines.append(line if not args.dry_run else line.without_bar())
            print(lines[-1], flush=True)
    if args.json:
        lines_json = [line.as_json() for line in lines]
        result = {"origin": origin, "load": load, "dry_run": args.dry_run, "lines": lines_json}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if any(line.wrong for line in lines):
        return 1
    return 3 if any(line.verdict == "missed" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
