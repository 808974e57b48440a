"""The communicator: refusals, autograd, cache, threads, closing."""

import threading

import pytest
import torch

from pyparallel import communicator as module
from pyparallel.communicator import Communicator, get_communicator
from pyparallel.devices import Device, resolve_devices

pytestmark = pytest.mark.usefixtures("poison")


def test_nothing_records_autograd(comm, devices, ranks, put):
    leaves = [put(torch.ones(ranks, 2), d).requires_grad_() for d in devices]
    results = [
        *(t for row in comm.broadcast([leaves[0].t()])[1:] for t in row),
        *comm.reduce_add([[leaf] for leaf in leaves]),
        *comm.all_reduce(leaves),
        *comm.scatter(leaves[0], [1] * ranks)[1:],
        comm.gather(leaves),
    ]
    assert not any(r.requires_grad for r in results)


# Refusals: before anything starts, and with values


def two(make_devices):
    return get_communicator(resolve_devices(make_devices(2)))


def test_wrong_ranks_and_counts(make_devices, put):
    comm = two(make_devices)
    x, y = (put(torch.ones(2), d) for d in make_devices(2))
    for call in (
        lambda root: comm.broadcast([x], root),
        lambda root: comm.reduce_add([[x], [y]], root),
        lambda root: comm.scatter(x, [1, 1], 0, root),
        lambda root: comm.gather([x, y], 0, root),
    ):
        for root in (-1, 2):
            with pytest.raises(ValueError, match=f"root {root} is not one of the 2 ranks"):
                call(root)
    with pytest.raises(ValueError, match="reduce_add: got 3 inputs for 2 ranks"):
        comm.reduce_add([[x]] * 3)
    with pytest.raises(ValueError, match="reduce_add: rank 1 has 2 tensors, but rank 0 has 1"):
        comm.reduce_add([[x], [y, y]])
    with pytest.raises(ValueError, match="all_reduce: got 1 tensors for 2 ranks"):
        comm.all_reduce([x])
    with pytest.raises(ValueError, match="scatter: got 3 chunks for 2 ranks"):
        comm.scatter(x, [1, 1, 0])
    with pytest.raises(ValueError, match="gather: got 3 tensors for 2 ranks"):
        comm.gather([x, y, y])


def test_wrong_shapes_and_dtypes(make_devices, put):
    comm = two(make_devices)
    x, y = (put(torch.ones(2, 3), d) for d in make_devices(2))
    with pytest.raises(ValueError, match="input 1 has invalid size: got 3x2, but expected 2x3"):
        comm.reduce_add([[x], [y.t()]])
    with pytest.raises(
        ValueError, match="input 1 has invalid dtype: got torch.float64, but expected torch.float32"
    ):
        comm.all_reduce([x, y.double()])
    with pytest.raises(RuntimeError, match="sum exactly to 2"):
        comm.scatter(x, [1, 2])
    with pytest.raises(IndexError, match="Dimension out of range"):
        comm.gather([x, y], 2)
    with pytest.raises(RuntimeError, match="zero-dimensional"):
        comm.gather([x.sum(), y.sum()])


def test_wrong_devices_and_types(make_devices):
    comm = two(make_devices)
    meta = torch.ones(2, device="meta")
    good = torch.ones(2, device=comm.devices[0].torch_device)
    for call in (
        lambda: comm.broadcast([good, meta]),
        lambda: comm.reduce_add([[good], [meta]]),
        lambda: comm.all_reduce([good, meta]),
        lambda: comm.scatter(meta, [1, 1]),
        lambda: comm.gather([good, meta]),
        lambda: comm.broadcast_into(good, [good, meta]),
    ):
        with pytest.raises(ValueError, match="but got one on meta"):
            call()
    for call in (lambda: comm.broadcast([[1.0]]), lambda: comm.all_reduce([good, None])):
        with pytest.raises(TypeError, match="not a tensor"):
            call()


@pytest.mark.parametrize("defect", ["dtype", "strides", "sparse", "conj", "shape"])
def test_wrong_outputs_are_refused_and_not_touched(make_devices, put, defect):
    comm = two(make_devices)
    names = make_devices(2)
    x, y = (put(torch.ones(4, 4, dtype=torch.complex64), d) for d in names)
    bad = {
        "dtype": torch.zeros(4, 4),
        "strides": torch.zeros(4, 4, dtype=torch.complex64).t(),
        "sparse": torch.zeros(4, 4, dtype=torch.complex64).to_sparse(),
        "conj": torch.zeros(4, 4, dtype=torch.complex64).conj(),
        "shape": torch.zeros(4, 5, dtype=torch.complex64),
    }[defect].to(y.device)
    good = torch.zeros_like(x)
    error = RuntimeError if defect == "shape" else ValueError
    for call in (
        lambda: comm.broadcast_into(x, [good, bad]),
        lambda: comm.all_reduce([x, y], [good, bad]),
        lambda: comm.scatter_into(torch.cat([x, x]), [good, bad]),
        lambda: comm.gather_into([x[:2], y[:2]], bad.to(x.device)),
    ):
        with pytest.raises(
            error, match=r"output tensor at index \d|out tensor to have|Output tensor at index 1"
        ):
            call()
    assert torch.equal(good, torch.zeros_like(good))


def test_closed(make_devices, put):
    comm = Communicator(resolve_devices(make_devices(2)))
    x, y = (put(torch.ones(2), d) for d in make_devices(2))
    comm.close()
    comm.close()
    for call in (
        lambda: comm.broadcast([x]),
        lambda: comm.broadcast([]),
        lambda: comm.broadcast_into(x, [x, y]),
        lambda: comm.reduce_add([[x], [y]]),
        lambda: comm.all_reduce([x, y]),
        lambda: comm.scatter(x, [1, 1]),
        lambda: comm.scatter_into(x, [x[:1], y[:1]]),
        lambda: comm.gather([x, y]),
        lambda: comm.gather_into([x, y], torch.cat([x, x])),
    ):
        with pytest.raises(RuntimeError, match="the communicator is closed"):
            call()


def test_no_devices_and_mixed_devices():
    with pytest.raises(ValueError, match="at least one device"):
        Communicator([])
    with pytest.raises(ValueError, match="GPUs or virtual devices, but got both: cpu:0, cuda:0"):
        Communicator([Device("cpu", 0), Device("cuda", 0)])


def test_unknown_algorithm(make_devices):
    with pytest.raises(ValueError, match="teleport"):
        two(make_devices).broadcast(
            [torch.ones(2, device=two(make_devices).devices[0].torch_device)], 0, "teleport"
        )


# Life


def test_cache(devices, make_devices):
    first = get_communicator(resolve_devices(devices))
    assert get_communicator(tuple(resolve_devices(devices))) is first
    assert first.devices == tuple(resolve_devices(devices))
    assert get_communicator(resolve_devices(make_devices(len(devices) + 1))) is not first
    first.close()
    second = get_communicator(resolve_devices(devices))
    assert second is not first and not second.closed


def test_cache_makes_one_for_many_threads(monkeypatch):
    monkeypatch.setattr(module, "_cache", {})
    barrier, found = threading.Barrier(8), []

    def ask():
        barrier.wait()
        found.append(get_communicator(resolve_devices(["cpu:0", "cpu:1"])))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_calls_from_many_threads(comm, devices, ranks, put):
    errors = []

    def work(seed):
        try:
            for step in range(20):
                terms = [
                    put(torch.full((257,), float(seed + r + step)), d)
                    for r, d in enumerate(devices)
                ]
                expected = sum(float(seed + r + step) for r in range(ranks))
                for total in comm.all_reduce(terms):
                    assert (total == expected).all()
                for row in comm.broadcast([terms[0]]):
                    assert (row[0] == float(seed + step)).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_only_broadcast():
    comm = get_communicator(resolve_devices(["cpu:0", "cpu:1"]))
    x, y = (torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8) for _ in range(2))
    for call in (
        lambda: comm.reduce_add([[x], [y]]),
        lambda: comm.all_reduce([x, y]),
        lambda: comm.scatter(x, [2, 2]),
        lambda: comm.gather([x, y]),
        lambda: comm.gather_into([x, y], torch.zeros(8)),
        lambda: comm.broadcast_into(x, [x, y]),
        lambda: comm.scatter_into(x, [x[:2], y[:2]]),
    ):
        with pytest.raises(TypeError, match=r": rank \d has a quantized tensor \(torch.qint8\)"):
            call()
