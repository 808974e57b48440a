"""An interrupt may come between any two lines of ours; the next step is right all the same."""

import linecache
import os
import sys

import pytest
import torch
from one_device import check_as_one_device
from torch import nn

import pyparallel
from pyparallel import workers

SOURCES = os.path.dirname(pyparallel.__file__)
# Points of one run that are tried. All were, once: 3000 to 7000 for each way and state.
POINTS = 60


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line of ours that the calling thread runs."""

    def __init__(self, n):
        self.n = n
        self.lines = 0
        self._last = {}

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        ours = frame.f_code.co_filename.startswith(SOURCES)
        # Python only reports what a finalizer raises.
        return self._line if ours and frame.f_code.co_name != "__del__" else None

    def _line(self, frame, event, arg):
        if event == "line":
            before, self._last[frame] = self._last.get(frame, 0), frame.f_lineno
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            # No signal is handled between the end of a with block and __exit__.
            if not (text.startswith("with ") and before > frame.f_lineno):
                self.lines += 1
                if self.lines == self.n:
                    raise KeyboardInterrupt
        return self._line


def check(model):
    check_as_one_device(model, torch.randn(8, 4))
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def unchanged(model):
    return None


def changed(model):
    model.module.first.weight.data = model.module.first.weight.data.clone()


def held(model):
    graph = model(torch.randn(8, 4))
    with torch.no_grad():
        model.module.first.weight.mul_(0.999)
    return graph


@pytest.mark.parametrize("dispatch", ["sequential", "threads"])
@pytest.mark.parametrize(
    "before", [unchanged, changed, held, None], ids=["unchanged", "changed", "held", "new"]
)
def test_the_step_after_an_interrupt(before, dispatch, monkeypatch):
    monkeypatch.setattr(workers, "cpu_count", lambda: 2)
    monkeypatch.delenv("PYPARALLEL_CHECK_DEVICES")
    torch.manual_seed(0)
    x = torch.randn(8, 4)

    def new():
        devices = pyparallel.virtual_devices(4)
        return pyparallel.DataParallel(Net(), devices, dispatch=dispatch, bucket_cap_mb=1e-4)

    def step(model, n):
        kept = before(model) if before is not None else None
        with Interrupt(n) as interrupt:
            model(x).sum().backward()
        del kept
        return interrupt.lines

    model = new()
    check(model)
    total = step(model if before is not None else new(), 0)
    assert total > 200
    for n in range(1, total * 9 // 10, total // POINTS):  # some runs have fewer lines
        if before is None:
            model = new()
        with pytest.raises(KeyboardInterrupt):
            step(model, n)
        check(model)
