"""bench/gpu_check.sh: a dry run, its summary and files, and what it does where something fails."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cmake import find_cmake

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench/gpu_check.sh"
NEEDS_A_GPU = {
    "stream-order",
    "faults",
    "memcheck",
    "racecheck",
    "host-staged",
    "expandable-segments",
    "launch-blocking",
}
PARTS = ["build", "stream-order", "suite", "faults", "memcheck", "racecheck", "bandwidth"]
PARTS += ["host-staged", "expandable-segments", "launch-blocking", "example"]


def gpu_check(*arguments, **variables):
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
    )


def summary_of(text):
    """Returns part -> (status, reason) from the summary, which must be the last thing printed."""
    lines = text[text.index("======== summary") :].splitlines()[1:]
    matches = [re.fullmatch(r"(\S+) +(ok|failed|skipped) +\d+ s  (.*)", line) for line in lines]
    return {m[1]: (m[2], m[3]) for m in matches if m}


@pytest.fixture
def module(monkeypatch):
    """Returns a function that imports a part of the check."""
    monkeypatch.syspath_prepend(ROOT / "bench/gpu")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))  # "build" and "part" are common names
    return importlib.import_module


@pytest.mark.slow
def test_dry_run(tmp_path):
    result = gpu_check("--dry-run", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = summary_of(result.stdout)
    assert list(summary) == PARTS
    assert {p for p, (status, reason) in summary.items() if reason == "no GPU"} == NEEDS_A_GPU
    assert {p for p, (status, _) in summary.items() if status == "skipped"} == {
        *NEEDS_A_GPU,
        "build",
    }
    assert "nothing here says anything about a GPU" in result.stdout.splitlines()[-1]

    (file,) = tmp_path.glob("*.json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-gpu-check-dry-run-4-ranks", file.stem)
    report = json.loads(file.read_text())
    assert report["failed"] == [] and [p["part"] for p in report["parts"]] == PARTS
    machine = report["machine"]
    assert machine["dry_run"] and machine["gpus"] == []
    assert machine["ranks"] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    details = {p["part"]: p["details"] for p in report["parts"]}
    assert details["suite"]["tests"] > 10 and details["suite"]["failed"] == []
    assert all(row["wrong"] == 0 for row in details["bandwidth"]["rows"])
    ops = {row["op"] for row in details["bandwidth"]["compared"]}
    assert ops == {"broadcast", "reduce_add", "scatter", "gather", "all_reduce"}
    assert all(row["torch_us"] is None for row in details["bandwidth"]["compared"])
    assert (tmp_path / f"{file.stem}.xml").exists()
    assert "======== example" in (tmp_path / f"{file.stem}.log").read_text()


def test_a_part_that_fails(tmp_path):
    result = gpu_check("--dry-run", "--out", tmp_path, "example", PYTHONPATH=broken(tmp_path))
    assert result.returncode == 1
    status, reason = summary_of(result.stdout)["example"]
    assert (status, reason) == ("failed", "the example ended with 1")
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["failed"] == ["example"]


def broken(folder):
    """Returns a folder with a scikit-learn that has no datasets."""
    (folder / "fake/sklearn").mkdir(parents=True)
    (folder / "fake/sklearn/__init__.py").write_text("")
    return str(folder / "fake")


def test_a_part_that_takes_too_long(module, tmp_path):
    report = module("report")
    (tmp_path / "parts").write_text("suite 124 110 110\nfaults 137 20 20\n")
    (tmp_path / "suite.log").write_text("first\nlast\n\n")
    parts = report.read_parts(tmp_path)
    assert [p["status"] for p in parts] == ["failed", "failed"]
    assert parts[0]["reason"] == "not done after 110 s; its last line: last"


def test_limits_add_up_to_less_than_nine_minutes():
    text = SCRIPT.read_text()
    limits = [int(s) for s in re.findall(r"^(?:part \S+|limited) (\d+) ", text, re.M)]
    kill_after = int(re.search(r"--kill-after=(\d+)", text)[1])
    assert len(limits) == len(PARTS) + 1
    assert sum(limits) + kill_after * len(limits) < 9 * 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-option"], "unknown option --no-such-option"),
        (["--out"], "--out needs a folder"),
        (["--out", "/proc/nowhere"], "cannot write into /proc/nowhere"),
    ],
)
def test_bad_arguments(arguments, message):
    result = gpu_check(*arguments)
    assert result.returncode == 2 and message in result.stderr


def test_an_unknown_part(tmp_path):
    result = gpu_check("--dry-run", "--out", tmp_path, "example", "memchek")
    assert result.returncode == 2
    assert "no part is called memchek; there are: build stream-order" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said(module, monkeypatch):
    machine = module("machine")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "find_nvcc", lambda: None)
    assert any("nvcc was not found" in text for text in machine.missing(dry_run=False))
    assert all("not installed" in text for text in machine.missing(dry_run=True))


@pytest.mark.parametrize(
    ("gpus", "ranks"), [(1, ["cuda:0"] * 4), (2, ["cuda:0", "cuda:1"]), (17, None)]
)
def test_ranks(module, gpus, ranks):
    chosen = module("machine").choose_ranks(gpus)
    assert chosen == (ranks or [f"cuda:{i}" for i in range(16)])


@pytest.mark.slow
def test_torchs_headers_replace_a_missing_pybind11(module, tmp_path):
    """CMake configures with them; compiling the core with them takes minutes."""
    cmake = find_cmake()
    build = module("build")
    if cmake is None or build.torch_headers() is None:
        pytest.skip("no new cmake, or a torch without pybind11's headers")
    stand_in = tmp_path / "stand-in"
    stand_in.mkdir()
    build.stand_in_for_pybind11(build.torch_headers(), stand_in)
    assert sorted(p.name for p in (stand_in / "include").iterdir()) == ["pybind11"]
    options = {"PYPARALLEL_CUDA": "OFF", "Python_EXECUTABLE": sys.executable}
    options["pybind11_DIR"] = str(stand_in)
    result = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path / "build", *(f"-D{k}={v}" for k, v in options.items())],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture
def simulated_suite(module, tmp_path, monkeypatch):
    """Runs the part "suite" on test files that are given as text; returns its outcome."""
    suite = module("suite")

    def run(limit=60, **files):
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        monkeypatch.setattr(suite, "TESTS", tmp_path)
        monkeypatch.chdir(tmp_path)
        args = argparse.Namespace(
            ranks="cpu:0", dry_run=False, limit=limit, junit=tmp_path / "junit.xml"
        )
        try:
            return suite.body(args)
        except suite.part.PartFailed as failure:
            return failure.details

    return run


def test_a_failing_test_and_a_crash_are_told_apart(simulated_suite, tmp_path):
    details = simulated_suite(
        good="def test_a():\n    pass\n",
        bad="def test_b():\n    assert 1 == 2\n",
        crash="import os\n\ndef test_c():\n    os._exit(9)\n",
    )
    assert details["tests"] == 3 and details["unfinished"] == []
    failed = {f["test"].split("::")[-1]: f["message"] for f in details["failed"]}
    assert failed == {
        "test_b": "assert 1 == 2",
        "the whole file": "ended with 9 and without a report",
    }
    assert (tmp_path / "junit.xml").read_text().count("<testsuite ") == 3


def test_a_test_that_hangs_leaves_the_others_counted(simulated_suite):
    details = simulated_suite(
        limit=12,
        hang="import time\n\ndef test_a():\n    pass\n\ndef test_b():\n    time.sleep(99)\n",
    )
    assert details["unfinished"] == ["test_hang.py"] and details["tests"] >= 1
