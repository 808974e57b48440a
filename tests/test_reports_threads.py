"""Threads, devices and interrupts as users reported them."""

import _thread
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyparallel
from pyparallel import virtual_devices


class Tuner:
    """As an autotuner that all replicas share: not made for several threads while it tunes."""

    def __init__(self):
        self.best = self.args = None
        self.mixed_up = 0

    def __call__(self, x):
        if self.best is None:
            self.args = x
            time.sleep(0.002)
            self.mixed_up += self.args is not x
            self.args = None
            self.best = 1
        return x * self.best


@pytest.mark.report("mamba#84", "mamba#370")
def test_the_first_call_runs_the_replicas_one_after_the_other():
    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.tuner = Tuner()

        def forward(self, x):
            return self.tuner(x)

    model, x = Tuned(), torch.arange(8.0)
    dp = pyparallel.DataParallel(model, virtual_devices(4))
    for _ in range(3):
        assert torch.equal(dp(x), x)
    assert model.tuner.mixed_up == 0
    # With workers from the start, one forward of the module itself tunes.
    model = Tuned()
    model(x)
    dp = pyparallel.DataParallel(model, virtual_devices(4), dispatch="threads")
    assert torch.equal(dp(x), x) and model.tuner.mixed_up == 0


class CurrentDevices(nn.Linear):
    """Notes the current device wherever code of the user's runs for a replica."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = []
        self.register_forward_hook(lambda module, args, output: module.note(output))
        self.register_full_backward_hook(lambda module, grads, outputs: module.note(outputs[0]))

    def note(self, tensor):
        self.seen.append((torch.cuda.current_device(), tensor.device.index))

    def part(self, x):
        self.note(x)
        return super().forward(x)

    def forward(self, x):
        self.note(x)
        out = checkpoint(self.part, x, use_reentrant=False)
        out.register_hook(self.note)
        return out


@pytest.mark.cuda
@pytest.mark.report("flash-attention#1793", "flash-attention#1782")
@pytest.mark.parametrize("dispatch", ["threads", "sequential"])
def test_the_current_device_is_that_of_the_replica(dispatch, make_devices):
    """A kernel that starts on the current device would otherwise read another one's memory."""
    devices = make_devices(4)
    model = CurrentDevices().to(devices[0])
    dp = pyparallel.DataParallel(model, devices, dispatch=dispatch)
    before = torch.cuda.current_device()
    dp(torch.ones(8, 2, requires_grad=True)).sum().backward()
    assert len(model.seen) == 4 * 6
    assert all(current == own for current, own in model.seen)
    assert torch.cuda.current_device() == before


@pytest.mark.report(
    "lightning#20523",
    "pytorch#37444",
    "mmdetection#3116",
    "mmdetection#3370",
    "mmsegmentation#238",
    "yolov5#264",
    "unsloth#431",
    "Kandinsky-2#68",
    "lightning#20424",
    "BallonsTranslator#485",
)
@pytest.mark.parametrize("dispatch", ["threads", "sequential"])
def test_an_interrupted_cell_leaves_a_usable_wrapper(dispatch):
    """As when a notebook's stop button is pressed in the middle of a step."""
    started, stopped = threading.Event(), threading.Event()

    class Endless(nn.Linear):
        def forward(self, x):
            started.set()
            end = time.monotonic() + 20
            while not stopped.is_set() and time.monotonic() < end:
                pass
            return super().forward(x)

    model, x = Endless(2, 2), torch.randn(6, 2)
    dp = pyparallel.DataParallel(model, virtual_devices(3), dispatch=dispatch)

    def press_stop():
        started.wait(10)
        _thread.interrupt_main()
        time.sleep(0.05)
        stopped.set()  # running workers cannot be stopped, and are waited for

    stopper = threading.Thread(target=press_stop)
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        dp(x)
    stopper.join()
    for _ in range(3):
        model.zero_grad()
        out = dp(x)
        torch.testing.assert_close(out, model(x))
        out.sum().backward()
        torch.testing.assert_close(model.weight.grad, x.sum(0).expand(2, 2))


BACKWARD = """
import threading, time, torch, _thread, pyparallel
model = torch.nn.Linear(2, 2)
dp = pyparallel.DataParallel(model, pyparallel.virtual_devices(3))
x = torch.ones(6, 2, requires_grad=True)
out = dp(x)
def spin(grad):
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
out.register_hook(spin)
threading.Timer(0.2, _thread.interrupt_main).start()
try:
    out.sum().backward()
    time.sleep(1)
except KeyboardInterrupt:
    print("interrupted")
model.zero_grad()
dp(x).sum().backward()
print(model.weight.grad.tolist())
"""


@pytest.mark.report("lightning#20523")
def test_an_interrupted_backward_leaves_a_usable_wrapper():
    result = subprocess.run(
        [sys.executable, "-c", BACKWARD], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.splitlines() == ["interrupted", "[[6.0, 6.0], [6.0, 6.0]]"], result.stderr
