"""A thread that notices when threads wait instead of working.

It looks from time to time while there is anything to look at. To be watched costs a call two
operations on a set; each look takes the interpreter lock, about 0.1 ms of the watched thread.
"""

import logging
import os
import sys
import threading
import time
import weakref
from typing import Protocol

# The longest time between two looks, in seconds.
_INTERVAL = 0.1
# After this many looks at nothing, about 5 s, the thread sleeps until there is something.
_IDLE_LOOKS = 50
# A thread that used less CPU time than this, in seconds, since it last worked has not worked. Who
# polls a lock, or waits for the interpreter lock, uses a little.
_WORK = 0.001
_DEBUGGERS = frozenset(("bdb", "pdb", "pydevd", "debugpy"))


class Watched(Protocol):
    """What can be watched.

    Attributes:
        patience: In seconds; it looks at least twice as often.
    """

    patience: float

    def look(self) -> None:
        """Called from the watchdog's thread; must not wait for anything."""


class Progress:
    """When a thread last worked. Made in that thread, asked by the watchdog."""

    def __init__(self) -> None:
        self._native_id = threading.get_native_id()
        self._ident = threading.get_ident()
        self._cpu_time = 0.0
        self._since = time.monotonic()

    def idle_seconds(self) -> float:
        """For how long the thread has waited, as far as anybody has asked.

        A thread that is ready to run but gets no CPU does not wait, nor does one that reads from a
        disk, sits in a debugger, or waits for the outcome of a nested ``parallel_apply`` that
        works. Where threads have no CPU clock, every thread that has not returned counts as
        waiting.
        """
        now = time.monotonic()
        cpu_time = _cpu_time(self._native_id)
        if cpu_time is not None and (
            cpu_time - self._cpu_time > _WORK or not _sleeps(self._native_id)
        ):
            self._cpu_time = cpu_time
            self._since = now
        idle = now - self._since
        if idle > 0:
            reference = _nested.get(self._ident)
            nested = reference() if reference is not None else None
            if nested is not None:
                return min(idle, nested.idle_seconds())
            if _in_debugger(self._ident):
                self._since = now
                return 0.0
        return idle


class Idle(Protocol):
    """Something whose threads may all wait."""

    def idle_seconds(self) -> float:
        """For how long all have waited."""


# Both hold nothing alive: an interrupt may keep a call from taking its entry out.
_watched: set[weakref.ref[Watched]] = set()
_nested: dict[int, weakref.ref[Idle]] = {}
_awake = threading.Event()
_thread: threading.Thread | None = None


def watch(watched: Watched) -> None:
    """Has ``watched.look`` called until ``unwatch``, or until nobody else holds ``watched``."""
    global _thread
    _watched.add(weakref.ref(watched))
    if _thread is None or not _awake.is_set():
        _awake.set()
        if _thread is None:
            # Two threads may get here at once; a second watchdog does no harm.
            thread = threading.Thread(target=_run, name="pp-watchdog", daemon=True)
            thread.start()
            _thread = thread


def unwatch(watched: Watched) -> None:
    """Ends ``watch``; one more look may be under way."""
    _watched.discard(weakref.ref(watched))


def waits_for(inner: Idle) -> None:
    """Tells that the calling thread waits for others, and works as long as they do."""
    _nested[threading.get_ident()] = weakref.ref(inner)


def waits_no_more() -> None:
    """Ends ``waits_for``."""
    _nested.pop(threading.get_ident(), None)


def _run() -> None:
    looks = 0
    while True:
        _awake.wait()
        time.sleep(min([_INTERVAL, *(watched.patience / 2 for watched in _alive())]))
        looks = 0 if _look_at_all() else looks + 1
        if looks > _IDLE_LOOKS:
            _awake.clear()
            if _watched:  # it came between the last look and clear
                _awake.set()


def _alive() -> list[Watched]:
    alive = []
    for reference in list(_watched):
        if (watched := reference()) is None:
            _watched.discard(reference)
        else:
            alive.append(watched)
    return alive


def _look_at_all() -> bool:
    alive = _alive()
    for one in alive:
        try:
            one.look()
        except Exception:  # whatever it is: if this thread ended, every later call could hang
            logging.getLogger("pyparallel").exception("the watchdog of replicas failed")
    return bool(alive)


def _cpu_time(native_id: int) -> float | None:
    """The CPU time of a thread in seconds; None where the system cannot tell or it has ended."""
    # The clock of thread t on Linux, as pthread_getcpuclockid makes it. That function wants a
    # thread that is sure to be alive.
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~native_id << 3) | 6)
    except OSError:
        return None


def _sleeps(native_id: int) -> bool:
    """Whether a thread waits for something that is neither a CPU nor a disk."""
    try:
        with open(f"/proc/self/task/{native_id}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return True
    return text[text.rindex(b")") + 2 :].startswith(b"S")


def _in_debugger(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if isinstance(name, str) and name.partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _forget() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _awake, _thread
    _watched.clear()
    _nested.clear()
    _awake = threading.Event()
    _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
