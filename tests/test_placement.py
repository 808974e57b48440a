"""Which ranks a call is about, for tensors of GPUs (stand-ins here) and of virtual devices."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from pyparallel import placement
from pyparallel.devices import Device
from pyparallel.placement import devices_of, gather_ranks, on_streams, reduce_ranks, with_source


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Four GPUs, as far as counting goes; the current one is 1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def on(*places):
    """Stand-ins for tensors: an int is a GPU, "cpu" the CPU."""
    return [
        SimpleNamespace(
            device=torch.device("cuda", p) if isinstance(p, int) else torch.device(p),
            is_cuda=isinstance(p, int),
            is_cpu=p == "cpu",
        )
        for p in places
    ]


def cuda(*indices):
    return [Device("cuda", i) for i in indices]


def cpu(*indices):
    return [Device("cpu", i) for i in indices]


def test_devices_of():
    assert devices_of(on(2, 0, 0)) == cuda(2, 0, 0)
    assert devices_of(on("cpu", "cpu")) == cpu(0, 1)
    with pytest.raises(ValueError, match="tensor at index 1 is on CPU"):
        devices_of(on(0, "cpu"))
    with pytest.raises(ValueError, match="tensor at index 1 is on meta"):
        devices_of(on(0, "meta"))


@pytest.mark.parametrize("destination", [1, "cuda:1", torch.device("cuda:1"), None, "cuda"])
def test_reduce_to_a_gpu(destination):
    assert reduce_ranks(on(0, 1, 1), destination) == (cuda(0, 1, 1), 1)


def test_reduce_refuses():
    with pytest.raises(RuntimeError, match="expects destination to be on the same GPU with one of"):
        reduce_ranks(on(0, 2), 1)
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        reduce_ranks(on(0, 1), "cpu")
    with pytest.raises(AssertionError, match="input 1 is on CPU"):
        reduce_ranks(on(0, "cpu"), 0)


def test_an_int_counts_devices_of_the_kind_of_the_inputs(monkeypatch):
    for variable in (None, "4"):
        if variable:
            monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", variable)
        assert reduce_ranks(on("cpu", "cpu"), 1) == (cpu(0, 1), 1)
        assert reduce_ranks(on(0, 1), 1) == (cuda(0, 1), 1)


def test_gather_on_gpus():
    assert gather_ranks(on(0, 1), None) == (cuda(0, 1), 1)
    assert gather_ranks(on(0, 1), 0) == (cuda(0, 1), 0)
    assert gather_ranks(on(0, 0), "cuda:0") == (cuda(0, 0), 0)
    assert gather_ranks(on(0, 2), 3) == (cuda(0, 2, 3), 2)
    assert gather_ranks(on(0, 1), "cpu") == (cuda(0, 1), None)
    with pytest.raises(ValueError, match="cuda:4 is not there"):
        gather_ranks(on(0, 1), 4)
    with pytest.raises(RuntimeError, match="tensor at index 1 has device cpu"):
        gather_ranks(on(0, "cpu"), 0)


def test_with_source():
    assert with_source(*on("cpu"), cpu(3, 1)) == (cpu(3, 1), 0, False)
    assert with_source(*on(1), cuda(0, 1, 1)) == (cuda(0, 1, 1), 1, False)
    assert with_source(*on(3), cuda(0, 1)) == (cuda(3, 0, 1), 0, True)
    assert with_source(*on("cpu"), cuda(0, 1)) == (cuda(0, 1), 0, False)


def stream(index):
    return SimpleNamespace(device=torch.device("cuda", index))


def test_streams_are_made_current_but_not_on_the_source_device(monkeypatch):
    entered = []
    monkeypatch.setattr(
        torch.cuda, "stream", lambda s: entered.append(s) or contextlib.nullcontext()
    )
    streams = [stream(0), None, stream(2), None]
    with on_streams(streams, cuda(0, 1, 2, 3), *on(0)):
        assert entered == [streams[2]]
    with on_streams(streams, cuda(0, 1, 2, 3), *on("cpu")):
        assert entered[1:] == [streams[0], streams[2]]
    with on_streams(None, cuda(0), *on(0)):
        pass
    assert len(entered) == 3
    with (
        pytest.raises(ValueError, match="scatter: got 4 streams for 3 ranks"),
        on_streams(streams, cuda(0, 1, 2), *on(0)),
    ):
        pytest.fail("entered")


def test_streams_of_other_devices_are_refused_before_any_is_entered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", lambda s: pytest.fail("entered"))
    with (
        pytest.raises(
            RuntimeError,
            match=r"Expected the device associated with the stream at index 1 \(was 3\) to match "
            r"the device supplied at that index \(expected 1\)",
        ),
        on_streams([stream(0), stream(3)], cuda(0, 1), *on("cpu")),
    ):
        pytest.fail("entered")
    with (
        pytest.raises(RuntimeError, match=r"index 0 \(was 0\)"),
        on_streams([stream(0)], cpu(2), *on(1)),
    ):
        pytest.fail("entered")


def test_ranks_of_one_gpu_share_a_stream(monkeypatch):
    entered = []
    monkeypatch.setattr(
        torch.cuda, "stream", lambda s: entered.append(s) or contextlib.nullcontext()
    )
    one = stream(2)
    with on_streams([one, one], cuda(2, 2), *on(0)):
        assert entered == [one]
    with (
        pytest.raises(ValueError, match="two streams for cuda:2, the second one at index 1"),
        on_streams([one, SimpleNamespace(device=one.device, handle=1)], cuda(2, 2), *on(0)),
    ):
        pytest.fail("entered")


def test_virtual_ranks_are_not_shared():
    first = devices_of(on("cpu"))
    first.append(None)
    assert devices_of(on("cpu")) == cpu(0)
    assert placement._virtual_ranks(2) == tuple(cpu(0, 1))
