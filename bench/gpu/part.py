"""What the parts of bench/gpu_check.sh have in common: arguments, ranks, how they end.

A part ends with 0 (ok), 1 (failed) or SKIPPED; the last line that it prints says why.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77


class SkipPart(Exception):
    """This machine cannot run the part; the text says what is missing."""


class PartFailed(Exception):
    """A check of the part did not hold; the text says which, with values."""

    def __init__(self, text: str, details: dict[str, object] | None = None) -> None:
        super().__init__(text)
        self.details = details


def parser() -> argparse.ArgumentParser:
    """Returns a parser of the arguments that every part has."""
    result = argparse.ArgumentParser()
    result.add_argument("--ranks", required=True, help="devices of the ranks: cuda:0,cuda:0,...")
    result.add_argument("--details", required=True, type=Path, help="JSON file to write")
    return result


def require_gpu(ranks: str) -> None:
    """Raises SkipPart for virtual devices. Needs no torch, whose import takes seconds."""
    if not ranks.startswith("cuda"):
        raise SkipPart("no GPU")


def check(condition: bool, text: str) -> None:
    """Raises PartFailed unless the condition holds."""
    if not condition:
        raise PartFailed(text)


def run(args: argparse.Namespace, body: Callable[[argparse.Namespace], dict[str, object]]) -> None:
    """Runs the part and exits. ``body`` returns what goes into the JSON file; "note" is a line."""
    try:
        details = body(args)
    except SkipPart as reason:
        print(reason)
        sys.exit(SKIPPED)
    except PartFailed as error:
        if error.details is not None:
            args.details.write_text(json.dumps(error.details))
        print(error)
        sys.exit(1)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(1)
    args.details.write_text(json.dumps(details))
    print(details.get("note", ""))
    sys.exit(0)
