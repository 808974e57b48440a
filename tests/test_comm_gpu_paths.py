"""What comm does for GPUs, simulated on the CPU by tensors that claim to be on a GPU.

This shows that ranks, roots and added ranks fit together. It shows nothing about a real GPU.
"""

import functools

import pytest
import torch
from tensors import values

from pyparallel import _C, checks, comm, communicator, core
from pyparallel.devices import Device

pytestmark = pytest.mark.usefixtures("poison", "simulated")


class OnGpu(torch.Tensor):
    is_cpu = False
    is_cuda = True
    index = 0

    @property
    def device(self):
        return torch.device("cuda", self.index)


class OnGpu1(OnGpu):
    index = 1


class OnGpu2(OnGpu):
    index = 2


class OnGpu3(OnGpu):
    index = 3


KINDS = [OnGpu, OnGpu1, OnGpu2, OnGpu3]


def on(gpu, tensor):
    return tensor.clone().as_subclass(KINDS[gpu])


@pytest.fixture
def simulated(monkeypatch):
    """Four GPUs, the current one is 1, whose memory is the host's. Logs the device lists in use."""
    used = []

    @functools.wraps(communicator.get_communicator)
    def logged(devices):
        used.append([d.index for d in devices])
        return communicator.Communicator(devices)

    for module in (comm, __import__("pyparallel.outputs").outputs):
        monkeypatch.setattr(module, "get_communicator", logged)
    for module in (checks, communicator):
        monkeypatch.setattr(module, "check_tensor", lambda operation, tensor, rank, device: None)
    monkeypatch.setattr(Device, "torch_device", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(core, "_open", lambda devices: _C.Communicator("host", [0] * len(devices)))
    for name in ("flat", "rows", "communicator"):
        monkeypatch.setattr(
            f"pyparallel.{name}.current_streams", lambda devices: [0] * len(devices)
        )
    return used


@pytest.mark.parametrize(
    "source, devices, ranks",
    [
        (1, [0, 1, 2], [0, 1, 2]),
        (0, [1, 2], [0, 1, 2]),
        (2, [2], [2]),
        (0, [0, 0, 0], [0, 0, 0]),
        (3, [0], [3, 0]),
    ],
)
def test_broadcast(simulated, source, devices, ranks):
    x = on(source, values(torch.float32, 5, 3))
    copies = comm.broadcast(x, devices)
    assert simulated == [ranks] and len(copies) == len(devices)
    assert all((torch.Tensor(c) == torch.Tensor(x)).all() for c in copies)
    own = [i for i, c in enumerate(copies) if c is x]
    assert own == ([devices.index(source)] if source in devices else [])
    outputs = [on(d, torch.zeros(5, 3)) for d in devices]
    result = comm.broadcast(x, out=outputs)
    assert simulated == [ranks, ranks]
    assert all(
        r is o and (torch.Tensor(o) == x).all() for r, o in zip(result, outputs, strict=True)
    )


def test_broadcast_out_from_a_transposed_source_on_another_gpu(simulated):
    x = on(3, values(torch.float32, 3, 5)).t()
    outputs = [on(0, torch.zeros(5, 3)), on(1, torch.zeros(5, 3))]
    version = x._version
    comm.broadcast(x, out=outputs)
    assert simulated == [[3, 0, 1]] and all((o == x).all() for o in outputs)
    assert x._version == version


def test_broadcast_from_the_host(simulated):
    x = values(torch.float32, 4)
    copies = comm.broadcast(x, [2, 0])
    assert simulated == [[2, 0]] and all(torch.equal(c, x) for c in copies)
    outputs = [on(2, torch.zeros(4)), on(0, torch.zeros(4))]
    comm.broadcast(x, out=outputs)
    assert all((o == x).all() for o in outputs)


@pytest.mark.behaviour(144)
def test_outputs_on_the_cpu_are_refused(simulated):
    text = "to be CUDA tensors, but output tensor at index 1 has device 'cpu'"
    with pytest.raises(RuntimeError, match=text):
        comm.broadcast(on(0, torch.ones(2)), out=[on(1, torch.zeros(2)), torch.zeros(2)])
    with pytest.raises(RuntimeError, match=text):
        comm.scatter(torch.ones(2), out=[on(1, torch.zeros(1)), torch.zeros(1)])
    assert simulated == []


@pytest.mark.parametrize(
    "source, devices, ranks",
    [(1, [0, 1, 2], [0, 1, 2]), (3, [0, 1, 2], [3, 0, 1, 2]), (0, [0, 0, 0], [0, 0, 0])],
)
def test_scatter(simulated, source, devices, ranks):
    x = on(source, values(torch.float32, 6, 2))
    outputs = [on(d, torch.zeros(n, 2)) for d, n in zip(devices, (1, 3, 2), strict=True)]
    for chunks in (comm.scatter(x, devices, [1, 3, 2]), comm.scatter(x, out=outputs)):
        assert (torch.cat([torch.Tensor(c) for c in chunks]) == x).all()
    assert simulated == [ranks, ranks]
    chunks = comm.scatter(x[:2], devices)
    assert [c.size(0) for c in chunks] == [1, 1]


def test_scatter_from_the_host(simulated):
    x = values(torch.float32, 2, 5)
    assert torch.equal(torch.cat(comm.scatter(x, [1, 0], dim=1), 1), x)
    outputs = [on(1, torch.zeros(2, 1)), on(0, torch.zeros(2, 4))]
    comm.scatter(x, dim=1, out=outputs)
    assert torch.equal(torch.cat([torch.Tensor(o) for o in outputs], 1), x)


@pytest.mark.behaviour(152)
@pytest.mark.parametrize(
    "destination, ranks", [(0, [0, 2]), (None, [0, 2, 1]), (3, [0, 2, 3]), ("cpu", [0, 2])]
)
def test_gather(simulated, destination, ranks):
    tensors = [on(0, values(torch.float32, 2, 3)), on(2, values(torch.float32, 1, 3, seed=1))]
    joined = comm.gather(tensors, 0, destination)
    assert simulated == [ranks]
    assert torch.equal(joined, torch.cat([torch.Tensor(t) for t in tensors]))
    if destination is not None:
        output = torch.zeros(3, 3)
        output = output if destination == "cpu" else on(destination, output)
        comm.gather(tensors, out=output)
        assert simulated == [ranks, ranks] and torch.equal(torch.Tensor(output), joined)


def test_sums(simulated):
    terms = [on(g, torch.full((3,), float(g))) for g in (0, 2, 2, 1)]
    assert comm.reduce_add(terms, 2).tolist() == [5.0] * 3
    assert comm.reduce_add(terms).tolist() == [5.0] * 3
    assert [t.tolist() for t in comm.all_reduce(terms)] == [[5.0] * 3] * 4
    assert comm.reduce_add_coalesced([[t, t] for t in terms])[1].tolist() == [5.0] * 3
    assert simulated == [[0, 2, 2, 1]] * 4
    with pytest.raises(RuntimeError, match="reduce_add expects destination"):
        comm.reduce_add(terms, 3)
