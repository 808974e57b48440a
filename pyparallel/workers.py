"""Threads that outlive the calls they work for.

All wrappers of the process share them. A worker that is needed while all are busy is started, so a
replica may itself use workers; it stays for the next call. Workers are daemons that wait for a
job without holding anything of the last one; they end when the interpreter exits. A forked child
starts its own.
"""

import atexit
import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

import torch

# How long the exit of the interpreter waits for workers, in seconds. An idle one ends at once; a
# busy one belongs to a call that its user gave up.
_EXIT_TIMEOUT = 1.0

Job = tuple[Callable[[], None], Callable[[], None]]


class _Worker(threading.Thread):
    """Runs jobs one after the other, with its own count of torch's CPU threads."""

    def __init__(self, key: tuple[str, int]) -> None:
        super().__init__(name="pp-worker", daemon=True)
        self.key = key
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def run(self) -> None:
        _take_share(self.key[1])
        while (job := self.jobs.get()) is not None:
            work, left = job
            try:
                work()
                del work, job
                # Idle first: whoever waits for the end of this job may want a worker at once.
                _give_back(self)
            finally:
                left()
                del left


_lock = threading.Lock()
_share_lock = threading.Lock()
_idle: dict[tuple[str, int], list[_Worker]] = {}
_all: list[_Worker] = []


def submit(kind: str, share: int, work: Callable[[], None], left: Callable[[], None]) -> None:
    """Runs ``work`` in a worker, then ``left`` once that worker is free again; returns at once.

    Args:
        kind: Workers of one kind serve each other's jobs, for instance "cuda:1".
        share: The number of torch's CPU threads for an operator of the job.
        work: Must not raise.
        left: Must not raise.
    """
    key = (kind, share)
    with _lock:
        idle = _idle.get(key)
        worker = idle.pop() if idle else None
    if worker is None:
        worker = _Worker(key)
        worker.start()
        with _lock:
            _all.append(worker)
    worker.jobs.put((work, left))


def name_thread(name: str) -> None:
    """Names the calling thread, which must be a worker, for Python and the operating system."""
    thread = threading.current_thread()
    if thread.name == name:
        return
    thread.name = name
    if sys.version_info >= (3, 14):
        return  # the assignment above told the operating system
    if hasattr(torch._C, "_set_thread_name"):
        torch._C._set_thread_name(name)
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME


def cpu_count() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _give_back(worker: _Worker) -> None:
    with _lock:
        _idle.setdefault(worker.key, []).append(worker)


def _take_share(share: int) -> None:
    """Sets the number of CPU threads of the calling thread only.

    ``torch.set_num_threads`` also sets what threads get that have not asked yet, so that is put
    back, by a thread that ends.
    """
    with _share_lock:
        # The first question in a thread answers with that default, and without it operators would
        # use the default whatever is set.
        default = torch.get_num_threads()
        if share != default:
            torch.set_num_threads(share)
            keeper = threading.Thread(target=torch.set_num_threads, args=(default,), daemon=True)
            keeper.start()
            keeper.join()


def _end() -> None:
    with _lock:
        workers = list(_all)
        _all.clear()
        _idle.clear()  # a function that is called at exit after this one gets workers of its own
    for worker in workers:
        worker.jobs.put(None)
    end = time.monotonic() + _EXIT_TIMEOUT
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))


def _forget() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _lock, _share_lock
    _lock = threading.Lock()
    _share_lock = threading.Lock()
    _idle.clear()
    _all.clear()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
