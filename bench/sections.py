"""The command line of benchmarks that print lines in sections, and hold them against bars."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from bars import Line
from origin import facts

EXIT_CODES = "Exit codes: 0 fine, 1 wrong values, 2 bad arguments, 3 a bar was missed."

Sizes = TypeVar("Sizes")


def run_sections(
    script: str,
    description: str,
    sections: Mapping[str, Callable[[Sizes], Sequence[Line]]],
    full: Sizes,
    tiny: Sizes,
    argv: list[str] | None,
) -> int:
    """Measures the sections named on the command line, or all of them.

    Args:
        script: Path from the checkout, ``bench/speed.py``.
        description: For ``--help``.
        sections: Each makes its lines, from sizes.
        full: The sizes for which the bars hold.
        tiny: The sizes of ``--dry-run``, which shows that every line works.
        argv: The command line; None: that of this process.

    Returns:
        The exit code.
    """
    args = _parse(script, description, sections, argv)
    torch.set_num_threads(1)  # torch's own threads would spin beside ours
    origin = facts(script, argv)
    load = os.getloadavg()[0]
    for name, value in origin.items():
        print(f"# {name}: {value}")
    print(f"# load: {load:.1f}" + (", so the numbers are worth little" if load > 1 else ""))
    print(f"#{'':43} {'lower':>8} {'median':>8} {'upper':>8}")
    lines: list[Line] = []
    for name in args.sections or sections:
        for line in sections[name](tiny if args.dry_run else full):
            lines.append(line if not args.dry_run else line.without_bar())
            print(lines[-1], flush=True)
    if args.json:
        lines_json = [line.as_json() for line in lines]
        result = {"origin": origin, "load": load, "dry_run": args.dry_run, "lines": lines_json}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if any(line.wrong for line in lines):
        return 1
    return 3 if any(line.verdict == "missed" for line in lines) else 0


def _parse(
    script: str, description: str, sections: Mapping[str, object], argv: list[str] | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=script, description=description, epilog=EXIT_CODES)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(sections))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, no bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there, too")
    args = parser.parse_args(argv)
    unknown = set(args.sections) - set(sections)
    if unknown:
        parser.error(
            f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(sections)}"
        )
    if args.json and not os.access(args.json.resolve().parent, os.W_OK):
        parser.error(f"--json {args.json}: cannot write into {args.json.resolve().parent}")
    return args
