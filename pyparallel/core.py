"""The compiled communicator of a list of devices: opened, closed, and left behind by a fork."""

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Iterable

from pyparallel import _C, env
from pyparallel.devices import Device

_live: "weakref.WeakSet[Core]" = weakref.WeakSet()
_lock = threading.Lock()
_exiting = False


class Core:
    """Owns one compiled communicator. A forked child opens its own at its first use."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self._devices = devices
        self._closed = False
        self._communicator: _C.Communicator | None = _open(devices)
        _live.add(self)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def get(self) -> _C.Communicator:
        """Returns the compiled communicator. Raises RuntimeError after ``close``.

        See ``end_daemon_at_exit``.
        """
        communicator = self._communicator
        if communicator is not None:
            return communicator
        with _lock:
            if self._closed:
                end_daemon_at_exit()
                raise RuntimeError("the communicator is closed")
            if self._communicator is None:
                self._communicator = _open(self._devices)
            return self._communicator

    def close(self) -> None:
        """Frees memory and threads once running work has left. Idempotent."""
        with _lock:
            self._closed = True
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()

    def _leave_behind(self) -> None:
        # The threads of the parent's communicator do not exist in this process, so nobody may wait
        # for them: its destructor must never run here. One reference too many sees to that.
        if self._communicator is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._communicator))
            self._communicator = None


def end_daemon_at_exit() -> None:
    """Ends a daemon thread once communicators have been closed at exit.

    It could work for some more milliseconds at best. With any other exception threading would print
    a traceback.
    """
    if _exiting and threading.current_thread().daemon:
        raise SystemExit


def close_at_exit(cores: Iterable[Core]) -> None:
    """Closes them: threads of the core end before the interpreter takes apart what they use."""
    global _exiting
    _exiting = True
    for core in cores:
        core.close()


def _open(devices: tuple[Device, ...]) -> _C.Communicator:
    debug = env.debug()
    communicator = _make(devices)
    if debug == "INFO":
        lines = communicator.describe_selection().splitlines()
        print(*(f"pyparallel: {line}" for line in lines), sep="\n", file=sys.stderr)
    return communicator


def _make(devices: tuple[Device, ...]) -> _C.Communicator:
    timeout_ms = env.timeout_ms()
    algorithms = env.algorithms()
    env.p2p()  # the core reads it, but only on GPUs
    if devices[0].kind == "cpu":
        return _C.Communicator(
            "host", [0] * len(devices), timeout_ms=timeout_ms, algorithms=algorithms
        )
    if not _C.build_info()["cuda"]:
        raise RuntimeError(
            "pyparallel was built without CUDA (no nvcc at build time), but got a tensor on "
            f"{devices[0]}. Rebuild: pip install --force-reinstall --no-deps ."
        )
    return _C.Communicator(
        "cuda", [d.index for d in devices], timeout_ms=timeout_ms, algorithms=algorithms
    )


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that does not exist here may have held the old one
    for core in list(_live):
        core._leave_behind()


os.register_at_fork(after_in_child=_after_fork)
