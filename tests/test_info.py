"""The report of python -m pyparallel.info."""

import os
import platform
import subprocess
import sys

import pytest
import torch

import pyparallel
from pyparallel import _C


def report(**variables: str) -> dict[str, str]:
    """Runs the command in a new process and reads its lines."""
    run = subprocess.run(
        [sys.executable, "-m", "pyparallel.info"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert all(": " in line for line in lines), run.stdout
    return dict(line.split(": ", 1) for line in lines)


def test_versions_and_build() -> None:
    lines = report()
    assert lines["pyparallel"].startswith(pyparallel.__version__ + " (")
    assert lines["python"].startswith(platform.python_version())
    assert lines["torch"].startswith(torch.__version__)
    assert lines["GIL"] in ("on", "off")
    assert lines["cores"] == f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    build = _C.build_info()
    assert str(build["compiler"]) in lines["built with"]
    if build["cuda"]:
        assert lines["built with"].endswith(f"CUDA {build['cuda_version']}")
        assert all(target.startswith("sm_") for target in lines["built for"].split())
    else:
        assert ", no CUDA" in lines["built with"]
        assert "built for" not in lines


def test_virtual_devices_and_variables() -> None:
    lines = report(PYPARALLEL_VIRTUAL_DEVICES="3")
    assert lines["device_ids=None"] == "cpu:0 cpu:1 cpu:2"
    assert lines["PYPARALLEL_VIRTUAL_DEVICES"] == "3"


def test_unknown_variables_and_virtual_devices_are_pointed_out() -> None:
    lines = report(PYPARALLEL_VIRTUAL_DEVICE="4", PYPARALLEL_P2P="off")
    assert lines["PYPARALLEL_VIRTUAL_DEVICE"] == "4 (not known: nothing reads it)"
    assert lines["PYPARALLEL_P2P"] == "off"
    if torch.cuda.device_count() == 0:
        assert "PYPARALLEL_VIRTUAL_DEVICES=4 makes four" in lines["device_ids=None"]


@pytest.mark.parametrize(
    "rest, start",
    [
        ("--help", "usage: python -m pyparallel.info"),
        ("| head -n 1", "pyparallel: "),
    ],
)
def test_help_and_a_reader_that_leaves(rest: str, start: str) -> None:
    command = f"{sys.executable} -m pyparallel.info {rest}"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(start) and run.stderr == ""


def test_a_bad_variable_is_reported_not_raised() -> None:
    lines = report(PYPARALLEL_VIRTUAL_DEVICES="many")
    assert "many" in lines["device_ids=None"]


def test_advice_when_torch_sees_more_than_the_core(monkeypatch) -> None:
    from pyparallel import info

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "without CUDA" in dict(info._advice(False))["note"]
    monkeypatch.setattr(_C, "cuda_device_count", lambda: 0)
    assert "cannot drive" in dict(info._advice(True))["note"]
    monkeypatch.setattr(_C, "cuda_device_count", lambda: 2)
    assert list(info._advice(True)) == []
