"""The model of the wait/signal/credit protocol, csrc/device/protocol.pml, checked with spin."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None, reason="spin is not installed (Debian package spin)"
)

MODEL = Path(__file__).parents[1] / "csrc" / "device" / "protocol.pml"

WITHOUT_TIMEOUTS = ("-DTIMEOUTS=0", "-DRUN_AHEAD=1")
TWO_WITH_TIMEOUTS = ("-DTIMEOUTS=1", "-DOPERATIONS=2")
CORRECT: dict[str, tuple[str, ...]] = {
    "six operations without timeouts": WITHOUT_TIMEOUTS,
    "three broadcasts with timeouts": ("-DTIMEOUTS=1", "-DOPERATIONS=3"),
    "broadcast from 2, reduce to 0, with timeouts": (*TWO_WITH_TIMEOUTS, "-DFIRST=2"),
}
BAD_SLOT = "assertion violated .*slot"
# What is planted, and what the checker must then say.
FAULTY: dict[tuple[str, ...], str] = {
    (*WITHOUT_TIMEOUTS, "-DFAULT=EARLY_CREDIT"): BAD_SLOT,
    (*WITHOUT_TIMEOUTS, "-DFAULT=OFF_BY_ONE_SLICE"): BAD_SLOT,
    (*WITHOUT_TIMEOUTS, "-DFAULT=POST_BEFORE_COPY"): BAD_SLOT,
    # A deadlock, which timeouts would turn into failures that are handled.
    (*WITHOUT_TIMEOUTS, "-DFAULT=COUNTER_PER_RANK"): "invalid end state",
    (*WITHOUT_TIMEOUTS, "-DFAULT=PLAIN_COMPARE"): BAD_SLOT,
    (*WITHOUT_TIMEOUTS, "-DSLOTS=3"): BAD_SLOT,
    (*TWO_WITH_TIMEOUTS, "-DFAULT=IGNORE_EXPIRED"): BAD_SLOT,
    (*TWO_WITH_TIMEOUTS, "-DFAULT=SET_REUSED"): BAD_SLOT,
    (*TWO_WITH_TIMEOUTS, "-DFAULT=FREED_AT_ONCE"): "assertion violated .*freed",
    (*TWO_WITH_TIMEOUTS, "-DRUN_AHEAD=1"): BAD_SLOT,
}

Report = Callable[[tuple[str, ...]], str]


def check(folder: Path, definitions: tuple[str, ...], optimisation: str) -> str:
    """Generates, compiles and runs the checker; returns what it printed."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    run("spin", "-a", *definitions, str(MODEL))
    # SAFETY leaves out the search for cycles: without timeouts all steps make progress.
    run("gcc", "-DSAFETY", optimisation, "-w", "-o", "pan", "pan.c")
    return run("./pan", "-m10000", "-w22")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """What the checker prints for a configuration. All of them run at once, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        futures: dict[tuple[str, ...], Future[str]] = {}
        for definitions in (*CORRECT.values(), *FAULTY):
            # Where the search is short, compiling for speed takes longer than it saves.
            optimisation = "-O2" if "-DOPERATIONS=3" in definitions else "-O0"
            folder = tmp_path_factory.mktemp("pan")
            futures[definitions] = pool.submit(check, folder, definitions, optimisation)
        yield lambda definitions: futures[definitions].result()


@pytest.mark.parametrize("name", CORRECT)
def test_the_protocol_is_right(name: str, report: Report) -> None:
    text = report(CORRECT[name])
    assert re.search(r"errors: 0$", text, re.MULTILINE), text
    assert "max search depth too small" not in text, text
    states = re.search(r"^ *(\d+) states, stored", text, re.MULTILINE)
    # Fewer would mean that the ranks hardly interleave.
    assert states is not None and int(states[1]) > 20_000, text


@pytest.mark.parametrize("definitions", FAULTY, ids=" ".join)
def test_a_planted_fault_is_found(definitions: tuple[str, ...], report: Report) -> None:
    text = report(definitions)
    assert re.search(f"pan:1: {FAULTY[definitions]}", text), text
