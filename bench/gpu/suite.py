"""Runs the test-suite on the ranks, one process a file.

An error that spoils a CUDA context, or a crash, costs the rest of its file only; and several files
run at a time, since most of a test's time is Python's.
"""

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path

import part

TESTS = part.ROOT / "tests"
LEFT_OUT = {
    "test_gpu_check.py",  # runs this
    "test_build.py",  # fetches packages
    "test_sass.py",  # compiles for GPUs that are not here
    "test_protocol_model.py",  # a model, which no device changes
}
IN_A_DRY_RUN = {"test_communicator.py"}
PROCESSES = 4
GRACE_S = 3  # for a process that was told to stop to write its report


def test_files(dry_run: bool) -> list[Path]:
    """Returns the files, largest first, so that a long one does not start last."""
    files = [f for f in TESTS.glob("test_*.py") if f.name not in LEFT_OUT]
    if dry_run:
        files = [f for f in files if f.name in IN_A_DRY_RUN]
    return sorted(files, key=lambda f: -f.stat().st_size)


class Run:
    """One file's process."""

    def __init__(self, file: Path, folder: Path, environment: dict[str, str]) -> None:
        self.name = file.name
        self._report = folder / f"{file.stem}.xml"
        self._log = folder / f"{file.stem}.log"
        command = [sys.executable, "-m", "pytest", str(file), "--tb=short"]
        command += ["-p", "no:cacheprovider", f"--junitxml={self._report}"]
        command += ["-o", "timeout=60", "-o", "faulthandler_timeout=50"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=part.ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def stop(self) -> None:
        """Lets pytest write its report, then ends it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def suite(self) -> xml.Element:
        """Returns the file's <testsuite>; one with an error where it was not written."""
        print(self._log.read_text(errors="replace"))
        try:
            suite = xml.parse(self._report).getroot().find("testsuite")
            if suite is not None:
                return suite
        except (OSError, xml.ParseError):
            pass
        suite = xml.Element("testsuite", name=self.name, tests="1", errors="1")
        case = xml.SubElement(suite, "testcase", classname=self.name, name="the whole file")
        message = f"ended with {self.process.returncode} and without a report"
        xml.SubElement(case, "error", message=message)
        return suite


def run_files(files: list[Path], args, environment: dict[str, str]) -> tuple[list[Run], list[str]]:
    """Runs the files until the time is up. Returns the runs, and the files that did not finish."""
    end = time.monotonic() + args.limit - 2 * GRACE_S
    waiting, running, runs = list(files), [], []
    processes = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) // 2))
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < processes:
            running.append(Run(waiting.pop(0), args.junit.parent, environment))
            runs.append(running[-1])
        time.sleep(0.05)
        running = [r for r in running if r.process.poll() is None]
    for run in running:
        run.stop()
    return runs, [r.name for r in running] + [f.name for f in waiting]


def failures(suites: list[xml.Element]) -> Iterator[dict[str, str]]:
    """Yields the tests that failed, with the first line of what they say."""
    for suite in suites:
        for case in suite.iter("testcase"):
            for kind in ("failure", "error"):
                for element in case.iter(kind):
                    message = (element.get("message") or "").splitlines()
                    name = f"{case.get('classname')}::{case.get('name')}"
                    yield {"test": name, "message": message[0] if message else kind}


def body(args) -> dict[str, object]:
    environment = dict(os.environ)
    if args.ranks.startswith("cuda"):
        environment["PYPARALLEL_TEST_DEVICES"] = args.ranks
    runs, unfinished = run_files(test_files(args.dry_run), args, environment)
    suites = [run.suite() for run in runs]
    root = xml.Element("testsuites")
    root.extend(suites)
    xml.ElementTree(root).write(args.junit)
    failed = list(failures(suites))
    tests = sum(len(list(suite.iter("testcase"))) for suite in suites)
    skipped = sum(len(list(suite.iter("skipped"))) for suite in suites)
    details = {"tests": tests, "skipped": skipped, "failed": failed, "unfinished": unfinished}
    details["note"] = f"{tests - skipped} tests passed, {skipped} skipped"
    if failed or unfinished or tests == skipped:
        details["note"] = (
            f"{len(failed)} of {tests} tests failed, {len(unfinished)} files unfinished: "
            + ", ".join([f["test"] for f in failed] + unfinished)
        )
        raise part.PartFailed(str(details["note"]), details)
    return details


if __name__ == "__main__":
    parser = part.parser()
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--limit", type=int, required=True, help="seconds")
    parser.add_argument("--junit", type=Path, required=True)
    part.run(parser.parse_args(), body)
