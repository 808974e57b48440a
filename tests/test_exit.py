"""The end of the process: communicators that are alive, threads in the middle of a transfer."""

import subprocess
import sys

import pytest

PREAMBLE = """
import threading, torch
from pyparallel.communicator import get_communicator
from pyparallel.devices import resolve_devices, virtual_devices
from pyparallel.streams import current_streams
torch.set_num_threads(1)
communicator = get_communicator(resolve_devices(virtual_devices(3)))
tensor = torch.ones(200_000)
def transfer():
    for algorithm in ("push", "chain"):
        communicator.broadcast([tensor], algorithm=algorithm)
transfer()
"""

ALIVE = "kept = communicator"
CYCLE = "communicator.itself = communicator; del communicator"
# The communicator is closed at exit; a thread that still wants to transfer is told so. The threads
# call nothing of torch, which aborts a process that ends while a daemon thread is inside of it.
DAEMONS = """
core = communicator.core
outputs = [tensor.clone() for _ in range(3)]
pointers = [output.data_ptr() for output in outputs]
streams = current_streams(communicator.devices)
def forever():
    try:
        while True:
            for algorithm in ("two_shot", "ring"):
                core.all_reduce(pointers, pointers, len(tensor), "float32", streams, algorithm)
    except RuntimeError as error:
        assert str(error) == "the communicator is closed"
for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
import time
time.sleep(0.2)
"""
ATEXIT = """
import atexit
atexit.register(transfer)
"""
RAISES = "import sys; sys.exit(3)"


@pytest.mark.parametrize(
    ("script", "status"),
    [(ALIVE, 0), (CYCLE, 0), (DAEMONS, 0), (ATEXIT, 0), (DAEMONS + RAISES, 3)],
    ids=["alive", "cycle", "daemon threads", "atexit", "exit status"],
)
def test_the_interpreter_exits_cleanly(script, status):
    run = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stderr) == (status, "")


WRAPPER = """
import atexit, os, sys, threading, time, torch, pyparallel
from torch import nn
torch.set_num_threads(1)
pyparallel.workers.cpu_count = lambda: 2
class Net(nn.Linear):
    before = staticmethod(lambda: None)
    def forward(self, x):
        self.before()
        return super().forward(x)
class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None
net = Net(4, 20000)
dp = pyparallel.DataParallel(net, pyparallel.virtual_devices(4), dispatch="threads")
x = torch.ones(8, 4)
def step(function=lambda: None):
    Backward.apply(dp(x), function).sum().backward()
step()
"""

FUNCTION_AT_EXIT = """
def late():
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    step()
    os.write(1, b"done")
atexit.register(late)
# A backward that stops after the sum of a bucket began; a graph that is never used.
def stop(grad):
    raise ValueError
handle = net.bias.register_hook(stop)
try:
    step()
except ValueError:
    pass
handle.remove()
graph = dp(x)
"""
EXIT_IN_FORWARD = """
threading.Thread(target=lambda: [step() for _ in range(10)]).start()
time.sleep(0.02)
net.before = lambda: sys.exit(5)
dp(x)
"""
EXIT_IN_BACKWARD = """
threading.Thread(target=step, args=(lambda: time.sleep(60),), daemon=True).start()
time.sleep(0.2)
step(lambda: sys.exit(6))
"""
EXIT_AT_ONCE = """
net.before = lambda: os._exit(7)
dp(x)
"""


@pytest.mark.parametrize(
    ("script", "status", "output"),
    [
        (FUNCTION_AT_EXIT, 0, "done"),
        (EXIT_IN_FORWARD, 5, ""),
        (EXIT_IN_BACKWARD, 6, ""),
        (EXIT_AT_ONCE, 7, ""),
    ],
    ids=["function at exit", "exit in forward", "exit in backward", "exit at once"],
)
def test_the_interpreter_exits_in_the_middle_of_a_step(script, status, output):
    run = subprocess.run(
        [sys.executable, "-c", WRAPPER + script], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (status, output, "")
