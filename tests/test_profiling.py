"""Named ranges, and the line that says where the time of the first steps went."""

import copy
import logging
import os
import pickle
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import profiling, virtual_devices
from pyparallel.devices import Device
from pyparallel.profiling import Span, Steps

NUMBER = r"(\d+\.\d\d)"


class Slow(nn.Module):
    """Takes 4 ms a rank."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(0.004)
        return self.linear(x)


def train(dp, steps):
    for _ in range(steps):
        dp.zero_grad()
        dp(torch.ones(8, 4)).sum().backward()


@pytest.mark.behaviour(16)
def test_ranges():
    dp = pyparallel.DataParallel(Slow(), virtual_devices(2))
    train(dp, 1)
    with torch.profiler.profile() as profile:
        train(dp, 1)
    events = profile.events()
    names = {event.name for event in events}
    parts = ("forward", "scatter", "replicate", "parallel_apply", "gather", "reduce")
    assert {f"pyparallel.DataParallel.{part}" for part in parts} <= names
    assert "DataParallel.forward" in names
    spans = {event.name: event.time_range for event in events}
    outer = spans["pyparallel.DataParallel.forward"]
    for part in ("scatter", "replicate", "parallel_apply", "gather"):
        inner = spans[f"pyparallel.DataParallel.{part}"]
        assert outer.start <= inner.start <= inner.end <= outer.end
    assert spans["pyparallel.DataParallel.reduce"].start >= outer.end


def test_ranges_of_methods_that_a_subclass_overrides():
    class Own(pyparallel.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return [(x,) for x in inputs[0].chunk(2)], [{}, {}]

    dp = Own(Slow(), virtual_devices(2))
    with torch.profiler.profile() as profile:
        dp(torch.ones(4, 4))
    assert "pyparallel.DataParallel.scatter" in {event.name for event in profile.events()}


def test_a_span_without_the_fast_range(monkeypatch):
    monkeypatch.setattr(profiling, "_record", torch.autograd.profiler.record_function)
    with torch.profiler.profile() as profile, Span("scatter") as span:
        time.sleep(0.01)
    assert 0.01 <= span.seconds < 1
    assert [e.name for e in profile.events()] == ["pyparallel.DataParallel.scatter"]


@pytest.mark.report("geo-deep-learning#17", "trl#1303")
def test_one_line_after_ten_steps(caplog):
    caplog.set_level(logging.INFO, logger="pyparallel")
    dp = pyparallel.DataParallel(Slow(), virtual_devices(2), dispatch="sequential")
    train(dp, 10)
    assert not caplog.records
    train(dp, 15)
    (line,) = [record.getMessage() for record in caplog.records]
    found = re.fullmatch(
        rf"DataParallel\(Slow\): steps 2 to 10 took {NUMBER} ms each: scatter {NUMBER}, replicate "
        rf"{NUMBER}, parallel_apply {NUMBER}, gather {NUMBER}, reduce {NUMBER}, the rest of "
        rf"backward and everything else {NUMBER}; forward on cpu:0 {NUMBER}, cpu:1 {NUMBER}",
        line,
    )
    assert found, line
    total, *parts, first, second = map(float, found.groups())
    assert sum(parts) == pytest.approx(total, abs=0.05)
    assert first >= 4 and second >= 4 and first + second <= parts[2] <= total


def test_without_the_level_nothing_is_measured(caplog):
    logging.getLogger("pyparallel").setLevel(logging.WARNING)
    try:
        steps = Steps("name")
        for _ in range(30):
            with steps.forward(), steps.part("scatter"), steps.rank(Device("cpu", 0)):
                pass
        assert not steps._parts and not steps._devices and not caplog.records
    finally:
        logging.getLogger("pyparallel").setLevel(logging.NOTSET)


def test_an_error_in_a_part_passes():
    steps = Steps("name")
    for around in (steps.forward(), steps.part("scatter"), steps.rank(Device("cpu", 0))):
        with pytest.raises(ValueError, match="bad"), around:
            raise ValueError("bad")


def test_copies():
    dp = pyparallel.DataParallel(Slow(), virtual_devices(2))
    train(dp, 3)
    for other in (copy.deepcopy(dp), pickle.loads(pickle.dumps(dp))):
        assert other._steps._forwards == 0
        train(other, 1)


@pytest.mark.parametrize(
    ("level", "expected"), [("INFO", True), ("WARN", False), ("", False), ("LOUD", None)]
)
def test_the_variable(level, expected):
    code = (
        "import torch, pyparallel\n"
        "dp = pyparallel.DataParallel(torch.nn.Linear(2, 2), pyparallel.virtual_devices(2))\n"
        "for _ in range(12): dp(torch.ones(4, 2))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYPARALLEL_DEBUG": level},
    )
    if expected is None:
        assert "PYPARALLEL_DEBUG must be WARN or INFO, but is 'LOUD'" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        line = "pyparallel: DataParallel(Linear): steps 2 to 10 took" in result.stderr
        assert line == expected
