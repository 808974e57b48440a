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
