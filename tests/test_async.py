"""Queued sums through the binding: tickets, order, threads, forks and exits."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from tensors import rank_order_sum, values

from pyparallel import _C

NRANKS = 3
LARGE = 300_000  # elements of a sum that takes its time: a millisecond


class Sum:
    """A sum of float32 or another dtype on the host."""

    def __init__(self, core, count, dtype=torch.float32, seed=0):
        self.core = core
        self.terms = [values(dtype, count, seed=seed + r) for r in range(core.nranks)]
        self.total = torch.full((count,), 77, dtype=dtype)

    def launch(self, root=0, algorithm="auto"):
        size = self.total.numel() * self.total.element_size()
        return self.core.reduce_add(
            root,
            [[t.data_ptr()] for t in self.terms],
            [0],
            [size],
            self.total.data_ptr(),
            str(self.total.dtype).removeprefix("torch."),
            [0] * self.core.nranks,
            algorithm,
            asynchronous=True,
        )

    def check(self):
        assert torch.equal(self.total, rank_order_sum(self.terms))


@pytest.fixture
def core():
    return _C.Communicator("host", [0] * NRANKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("root", [0, 2])
def test_queued_sums_have_the_bits_of_ordinary_ones(core, dtype, root):
    queued = Sum(core, LARGE, dtype)
    ticket = queued.launch(root)
    assert ticket > 0
    core.wait(ticket)
    queued.check()


def test_many_tickets_in_any_order(core):
    sums = [Sum(core, 20_000 + i, seed=i) for i in range(60)]
    tickets = [s.launch() for s in sums]
    assert all(tickets)
    assert tickets == sorted(tickets)
    for i in [59, *range(0, 59, 2), *range(1, 59, 2)]:
        core.wait(tickets[i])
        sums[i].check()


def test_small_sums_are_done_at_once(core):
    core.synchronize()
    small = Sum(core, 1000)
    assert small.launch() == 0
    small.check()
    core.wait(0)


def test_synchronize_and_close_wait(core):
    sums = [Sum(core, LARGE, seed=i) for i in range(8)]
    for s in sums:
        s.launch()
    core.synchronize()
    for s in sums:
        s.check()
    for s in sums:
        s.total.fill_(77)
        s.launch()
    core.close()
    for s in sums:
        s.check()


def test_deleting_the_communicator_waits():
    core = _C.Communicator("host", [0] * NRANKS)
    sums = [Sum(core, LARGE, seed=i) for i in range(8)]
    for s in sums:
        s.launch()
        del s.core
    del core
    for s in sums:
        s.check()


@pytest.mark.behaviour(153)
def test_other_threads_run_python_meanwhile(core):
    """The GIL is free while a call waits."""
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        s = Sum(core, 20_000_000)
        ticket = s.launch()
        before = ticks
        core.wait(ticket)
        assert ticks > before
    finally:
        done.set()
        ticker.join()


def test_a_thread_that_queued_may_end(core):
    sums = [Sum(core, LARGE, seed=i) for i in range(4)]
    tickets = []
    for s in sums:
        thread = threading.Thread(target=lambda s=s: tickets.append(s.launch()))
        thread.start()
        thread.join()
    for s, ticket in zip(sums, tickets, strict=True):
        core.wait(ticket)
        s.check()


def test_unknown_tickets(core):
    s = Sum(core, LARGE)
    ticket = s.launch()
    core.wait(ticket)
    core.wait(ticket)
    for wrong in (ticket + 1, 1, 2**64 - 1):
        with pytest.raises(ValueError, match=f"no ticket {wrong}"):
            core.wait(wrong)
    with pytest.raises(TypeError):
        core.wait(-1)


def test_wrong_arguments_are_raised_by_the_call(core):
    s = Sum(core, LARGE)
    with pytest.raises(ValueError, match="unknown algorithm 'ring'"):
        s.launch(algorithm="ring")
    with pytest.raises(ValueError, match="root is 3"):
        s.launch(root=3)
    core.close()
    with pytest.raises(RuntimeError, match="the communicator is closed"):
        s.launch()


def thread_names():
    return [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_thread_has_a_name_and_sleeps(core):
    s = Sum(core, LARGE)
    core.wait(s.launch())
    assert thread_names().count("pp-comm") == 1
    task = next(
        p.parent for p in Path("/proc/self/task").glob("*/comm") if "pp-comm" in p.read_text()
    )
    ticks = []
    for _ in range(2):
        ticks.append((task / "stat").read_text().rsplit(")", 1)[1].split()[11:13])
        time.sleep(0.3)
    assert ticks[0] == ticks[1]


# ---- Processes -----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_starts_afresh(core):
    """In the middle of sums: the child hangs nowhere, and the parent's are right."""
    sums = [Sum(core, LARGE, seed=i) for i in range(20)]
    mine = Sum(core, LARGE)
    # The child uses no parallel operation of torch, since OpenMP's threads are not there.
    want = rank_order_sum(mine.terms).tolist()
    tickets = [s.launch() for s in sums]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            core.synchronize()  # nothing of this process is queued
            with pytest.raises(ValueError, match="no ticket"):
                core.wait(tickets[-1])
            core.wait(mine.launch())
            assert mine.total.tolist() == want
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended[1] == 0
    for s, ticket in zip(sums, tickets, strict=True):
        core.wait(ticket)
        s.check()


def run_script(text):
    script = textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


QUEUE = """
    import os, sys, threading, torch
    from pyparallel import _C
    core = _C.Communicator("host", [0] * 3)
    def launch():
        terms = [torch.ones(2_000_000) for _ in range(3)]
        total = torch.empty(2_000_000)
        core.reduce_add(0, [[t.data_ptr()] for t in terms], [0], [8_000_000],
                        total.data_ptr(), "float32", [0] * 3, asynchronous=True)
        return terms, total
    kept = [launch() for _ in range(30)]
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("raise KeyError('boom')", 1),
        ("threading.Thread(target=lambda: kept.append(launch())).start()", 0),
        ("threading.Thread(target=core.synchronize, daemon=True).start()", 0),
        ("import atexit; atexit.register(lambda: kept.clear())", 0),
    ],
)
def test_a_process_may_exit_in_the_middle(end, status):
    """What is queued is done before the interpreter frees its memory."""
    if "atexit" in end:
        # Registered later, so called earlier: such a handler has to wait by itself.
        end = end.replace("kept.clear()", "(core.synchronize(), kept.clear())")
    done = run_script(QUEUE + "    " + end)
    assert done.returncode == status, done.stderr
    assert ("KeyError" in done.stderr) == ("KeyError" in end)
    assert status == 1 or done.stderr == ""
