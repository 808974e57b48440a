"""Workers: they persist, have names and their share of CPU threads, and end when they should."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import virtual_devices, workers
from pyparallel.devices import resolve_devices
from pyparallel.dispatch import Dispatcher
from pyparallel.parallel_apply import parallel_apply


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def in_threads(function, n=2, dispatcher=None):
    return parallel_apply(
        [Call(function)] * n,
        list(range(n)),
        [{}] * n,
        resolve_devices(virtual_devices(n)),
        dispatcher or Dispatcher("threads"),
    )


def script(code, **kwargs):
    """Runs a program; returns what it printed."""
    head = "import os, sys, threading, time, torch, pyparallel\nfrom torch import nn\n"
    return subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        **kwargs,
    )


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch):
    monkeypatch.setattr(workers, "cpu_count", lambda: 2)


@pytest.mark.report("pytorch#46753")
def test_they_persist():
    barrier = threading.Barrier(2, timeout=60)

    def meet(rank):
        barrier.wait()
        return threading.get_ident()

    dispatcher = Dispatcher("threads")
    first = set(in_threads(meet, dispatcher=dispatcher))
    count = threading.active_count()
    assert len(first) == 2 and threading.get_ident() not in first
    for _ in range(50):
        assert set(in_threads(meet, dispatcher=dispatcher)) == first
    assert set(in_threads(meet)) == first, "all wrappers share them"
    assert threading.active_count() == count


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_no_more_than_cpus_or_ranks(n):
    """Each runs one rank after the other."""
    running, most = [], []

    def forward(rank):
        running.append(rank)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(rank)
        return rank

    assert in_threads(forward, n) == list(range(n))
    assert max(most) == min(n, 2)


def test_names():
    def names(rank):
        with open(f"/proc/self/task/{threading.get_native_id()}/comm") as file:
            return threading.current_thread().name, file.read().strip()

    for _ in range(3):
        assert in_threads(names, 3) == [(f"pp-cpu:{rank}",) * 2 for rank in range(3)]
    main = threading.current_thread().name
    in_threads(names, 3, Dispatcher("sequential"))
    assert threading.current_thread().name == main


def test_each_has_its_share_of_the_cpu_threads():
    """And neither the caller nor a thread that starts later has another number than before."""
    result = script(
        """
from pyparallel import workers
workers.cpu_count = lambda: 2
class Threads(nn.Module):
    def forward(self, x):
        return x * 0 + torch.get_num_threads()
dp = pyparallel.DataParallel(Threads(), pyparallel.virtual_devices(4), dispatch="threads")
for count in (1, 2, 3, 5, 8, 2):
    torch.set_num_threads(count)
    shares = dp(torch.zeros(4)).tolist()
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start(); thread.join()
    assert shares == [max(1, count // 2)] * 4, (count, shares)
    assert torch.get_num_threads() == count and later == [count], (count, later)
"""
    )
    assert result.returncode == 0, result.stderr


def test_a_caller_that_never_asked_keeps_the_default():
    result = script(
        """
from pyparallel import workers
done = threading.Event()
workers.submit("cpu", 1, lambda: None, done.set)
done.wait()
print(torch.get_num_threads())
""",
    )
    default = script("print(torch.get_num_threads())").stdout.strip()
    assert result.stdout.strip() == default, result.stderr


def test_an_idle_worker_holds_nothing():
    class Big:
        pass

    def forward(rank):
        big = Big()
        seen.append(weakref.ref(big))
        return big

    seen = []
    gc.collect()
    gc.disable()
    try:
        module = Call(forward)
        alive = weakref.ref(module)
        devices = resolve_devices(virtual_devices(2))
        parallel_apply([module] * 2, [0, 1], [{}] * 2, devices, Dispatcher("threads"))
        del module, forward
        assert alive() is None and [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_a_replica_may_use_workers_itself():
    """More calls inside each other than workers: no call waits for a worker that is busy."""

    def inner(rank):
        return torch.tensor(float(rank))

    def middle(rank):
        return sum(in_threads(inner, 3))

    def outer(rank):
        return sum(in_threads(middle, 3))

    assert in_threads(outer, 3) == [9.0] * 3


def test_nested_wrappers():
    inner = pyparallel.DataParallel(nn.Linear(4, 4), virtual_devices(2), dispatch="threads")
    dp = pyparallel.DataParallel(inner, virtual_devices(2), dispatch="threads")
    x = torch.randn(8, 4)
    torch.testing.assert_close(dp(x), inner.module(x))


def test_two_threads_in_one_wrapper():
    dp = pyparallel.DataParallel(nn.Linear(4, 4), virtual_devices(2), dispatch="threads")
    errors = []

    def use():
        try:
            for _ in range(20):
                x = torch.randn(6, 4)
                torch.testing.assert_close(dp(x), dp.module(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


FORK = """
dp = pyparallel.DataParallel(nn.Linear(4, 4), pyparallel.virtual_devices(2), dispatch="threads")
x = torch.ones(4, 4)
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork either
expected = dp(x).tolist()
child = os.fork()
if child == 0:
    good = all(dp(x).tolist() == expected for _ in range(3))
    os._exit(0 if good else 1)
_, status = os.waitpid(child, 0)
assert dp(x).tolist() == expected
print("status", status)
"""


def test_a_forked_child_has_workers_of_its_own():
    result = script(FORK)
    assert result.stdout.strip() == "status 0", result.stderr


EXITS = {
    "idle": "dp(x)",
    "busy": """
threading.Thread(target=lambda: dp(x), daemon=True).start()
time.sleep(0.3)
""",
    "in a thread that is waited for": "threading.Thread(target=lambda: dp(x)).start()",
    "an error": "dp(x)\nsys.exit(3)",
}


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_exits(how):
    code = """
class Slow(nn.Module):
    seconds = 0.2
    def forward(self, x):
        time.sleep(self.seconds)
        return x @ x.T
dp = pyparallel.DataParallel(Slow(), pyparallel.virtual_devices(2), dispatch="threads")
x = torch.ones(4, 4)
"""
    if how == "busy":
        code = code.replace("seconds = 0.2", "seconds = 30.0")
    start = time.monotonic()
    result = script(code + EXITS[how])
    assert result.returncode == (3 if how == "an error" else 0), result.stderr
    assert not result.stderr
    assert time.monotonic() - start < 25


INTERRUPTED = r"""
import signal
class Slow(nn.Module):
    def forward(self, x):
        os.write(1, b"start\n")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            pass  # who sleeps counts as waiting for another replica
        os.write(1, b"end\n")
        return x
dp = pyparallel.DataParallel(Slow(), pyparallel.virtual_devices(4), dispatch=DISPATCH)
from pyparallel import workers
workers.cpu_count = lambda: 2
try:
    dp(torch.ones(4, 4))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def interrupt(dispatch, seconds, signals):
    code = INTERRUPTED.replace("SECONDS", str(seconds)).replace("DISPATCH", repr(dispatch))
    head = "import os, sys, threading, time, torch, pyparallel\nfrom torch import nn\n"
    with subprocess.Popen(
        [sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True
    ) as process:
        lines = [process.stdout.readline().strip()]
        for _ in range(signals):
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        lines += process.stdout.read().split()
        process.wait(60)
    return lines


@pytest.mark.behaviour(117, 176)
def test_an_interrupt_waits_for_what_runs_and_starts_no_more():
    lines = interrupt("threads", 1.5, signals=1)
    assert lines.count("start") == 2
    assert sorted(lines[:-1]) == ["end", "end", "start", "start"] and lines[-1] == "interrupted"


@pytest.mark.behaviour(117)
def test_a_second_interrupt_does_not_wait():
    lines = interrupt("threads", 20, signals=2)
    assert lines == ["start", "start", "interrupted"]


@pytest.mark.behaviour(117, 176)
def test_an_interrupt_stops_a_replica_in_the_callers_thread():
    assert interrupt("sequential", 20, signals=1) == ["start", "interrupted"]


def test_a_wrapper_leaves_nothing_behind():
    dp = pyparallel.DataParallel(nn.Linear(4, 4), virtual_devices(2), dispatch="threads")
    dp(torch.ones(4, 4))
    module = weakref.ref(dp.module)
    del dp
    gc.collect()
    assert module() is None
