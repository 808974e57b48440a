"""The compiled communicator of a device list: opening, closing, forking."""

import os
import signal
import warnings

import pytest
import torch

from pyparallel import _C, core
from pyparallel.communicator import get_communicator
from pyparallel.core import Core
from pyparallel.devices import Device, resolve_devices, virtual_devices


def test_options_are_passed_on(monkeypatch):
    seen = {}

    class Fake:
        def __init__(self, backend, devices, **options):
            seen.update(backend=backend, devices=devices, **options)

        def close(self):
            pass

    monkeypatch.setattr(_C, "Communicator", Fake)
    monkeypatch.setenv("PYPARALLEL_TIMEOUT_MS", "1234")
    monkeypatch.setenv("PYPARALLEL_ALGO", "broadcast:chain")
    options = {"timeout_ms": 1234, "algorithms": "broadcast:chain"}
    Core((Device("cpu", 5), Device("cpu", 1)))
    assert seen == {"backend": "host", "devices": [0, 0], **options}
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": True})
    Core((Device("cuda", 2), Device("cuda", 2)))
    assert seen == {"backend": "cuda", "devices": [2, 2], **options}


def test_a_build_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": False})
    with pytest.raises(
        RuntimeError, match="built without CUDA.*got a tensor on cuda:1. Rebuild: pip"
    ):
        Core((Device("cuda", 1),))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_p2p_is_checked_on_all_devices(monkeypatch, kind):
    monkeypatch.setenv("PYPARALLEL_P2P", "maybe")
    with pytest.raises(ValueError, match="PYPARALLEL_P2P.*'maybe'"):
        Core((Device(kind, 0),))


def test_close():
    it = Core((Device("cpu", 0), Device("cpu", 1)))
    compiled = it.get()
    assert it.get() is compiled and not it.closed
    it.close()
    it.close()
    assert it.closed and compiled.closed
    with pytest.raises(RuntimeError, match="the communicator is closed"):
        it.get()


def _in_child(work):
    """Returns what ``work`` answers in a forked child, within 20 seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Python warns of forks of threaded processes, which is the point
        read, write = os.pipe()
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            answer = str(work())
        except BaseException as error:
            answer = repr(error)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    assert status == 0, f"the child ended with status {status}"
    return answer


def test_a_forked_child_opens_its_own():
    communicator = get_communicator(resolve_devices(virtual_devices(3)))
    x = torch.arange(1 << 20)  # 8 MiB: enough for the core's threads

    def work():
        # No torch operation that uses OpenMP threads: those do not survive a fork.
        return [row[0][-1].item() for row in communicator.broadcast([x])]

    expected = [(1 << 20) - 1] * 3
    assert work() == expected
    parent = communicator._core.get()
    assert _in_child(work) == str(expected)
    assert _in_child(lambda: communicator._core.get() is parent) == "False"
    assert work() == expected


def test_a_lock_held_while_forking_does_not_stop_the_child():
    communicator = get_communicator(resolve_devices(virtual_devices(2)))
    with core._lock:
        assert _in_child(lambda: communicator.broadcast([torch.ones(1)])[1][0].item()) == "1.0"


def test_a_closed_one_stays_closed_in_the_child():
    it = Core((Device("cpu", 0),))
    it.close()
    assert "the communicator is closed" in _in_child(it.get)
