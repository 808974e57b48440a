"""comm.reduce_add, reduce_add_coalesced and all_reduce: results, destinations, error texts."""

import pytest
import torch
from tensors import overlap, rank_order_sum, same_bits, values

from pyparallel import comm

pytestmark = pytest.mark.usefixtures("poison")

ADDED = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def where(device):
    return torch.device("cpu" if device.startswith("cpu") else device)


def terms_on(devices, put, dtype, *shape):
    return [put(values(dtype, *shape, seed=r), d) for r, d in enumerate(devices)]


@pytest.mark.behaviour(148)
@pytest.mark.report("pytorch#2573", "pytorch#1782")
@pytest.mark.parametrize("dtype", ADDED, ids=str)
def test_reduce_add(devices, dtype, put):
    inputs = terms_on(devices, put, dtype, 3, 5)
    before = [t.clone() for t in inputs]
    for destination in {0: devices[0], 1: devices[-1]}.values():
        total = comm.reduce_add(inputs, destination)
        assert total.device == where(destination) and total.dtype == dtype
        assert same_bits(total, rank_order_sum(inputs))
        assert len(devices) == 1 or not any(overlap(total, t) for t in inputs)
    assert all(same_bits(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.behaviour(148)
def test_destinations_of_virtual_devices():
    inputs = [torch.full((2,), float(r)) for r in range(3)]
    for destination in (None, 0, 2, "cpu", "cpu:1", torch.device("cpu"), torch.device("cpu:2")):
        assert comm.reduce_add(iter(inputs), destination).tolist() == [3.0, 3.0]
    for destination in (3, "cpu:3", "cuda:0"):
        name = "cpu:3" if destination == 3 else destination
        text = f"on the same device with one of the tensors, but got {name}; they are on cpu:0, cpu"
        with pytest.raises(RuntimeError, match=f"reduce_add expects destination to be {text}"):
            comm.reduce_add(inputs, destination)
    with pytest.raises(RuntimeError, match="Expected non-negative device index, but got -1"):
        comm.reduce_add(inputs, -1)
    with pytest.raises(ValueError, match="specified index or an integer, but got:1.5"):
        comm.reduce_add(inputs, 1.5)


@pytest.mark.behaviour(148)
def test_one_input_is_returned_as_it_is(make_devices, put):
    (name,) = make_devices(1)
    x = put(torch.ones(3), name)
    assert comm.reduce_add([x], name) is x


def test_leaves_may_be_added(devices, put):
    leaves = [put(torch.ones(2), d).requires_grad_() for d in devices]
    total = comm.reduce_add(leaves, devices[0])
    assert total.tolist() == [float(len(devices))] * 2
    assert len(devices) == 1 or not total.requires_grad


@pytest.mark.behaviour(148)
def test_sparse_inputs(devices, put):
    inputs = [put(torch.tensor([0.0, 2.0]), d).to_sparse() for d in devices]
    total = comm.reduce_add(inputs, devices[0])
    assert total.layout == torch.sparse_coo
    assert total.to_dense().tolist() == [0, 2.0 * len(devices)]


@pytest.mark.behaviour(148)
def test_reduce_add_errors(make_devices, put):
    names = make_devices(2)
    x, y = (put(torch.ones(3, 3), d) for d in names)
    with pytest.raises(ValueError, match="input 1 has invalid size: got 2x3, but expected 3x3"):
        comm.reduce_add([x, y[:2]], names[0])
    with pytest.raises(ValueError, match="input 1 has invalid dtype: got torch.int32"):
        comm.reduce_add([x, y.int()], names[0])
    with pytest.raises(ValueError, match="at least one input"):
        comm.reduce_add([])
    with pytest.raises(
        AssertionError, match="expects all inputs to be on GPUs, but input 0 is on CPU"
    ):
        comm.reduce_add([torch.ones(2), torch.ones(2, device="meta")])
    with pytest.raises(ValueError, match="tensor at index 0 is on meta"):
        comm.reduce_add([torch.ones(2, device="meta")] * 2)


# Coalesced


@pytest.mark.behaviour(149)
def test_coalesced(devices, put):
    shapes = [(torch.float32, (3, 5)), (torch.int64, (4,)), (torch.float32, ()), (torch.bool, (2,))]
    shapes += [(torch.float32, (0,)), (torch.bfloat16, (9,)), (torch.complex64, (3,))]
    inputs = [
        [put(values(t, *s, seed=10 * r + k), d) for k, (t, s) in enumerate(shapes)]
        for r, d in enumerate(devices)
    ]
    for buffer_size in (10485760, 32, 1):
        sums = comm.reduce_add_coalesced(inputs, devices[-1], buffer_size)
        assert isinstance(sums, tuple) and len(sums) == len(shapes)
        for k, total in enumerate(sums):
            terms = [row[k] for row in inputs]
            assert total.device == where(devices[-1])
            assert same_bits(total, rank_order_sum(terms))
            assert total.numel() == 0 or not any(overlap(total, t) for t in terms)
        version = sums[2]._version
        sums[0].add_(1)
        assert sums[2]._version == version


@pytest.mark.behaviour(149)
def test_coalesced_sparse_stays_sparse_only_where_all_are(devices, put):
    dense = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    inputs = []
    for r, d in enumerate(devices):
        here = put(dense, d)
        inputs.append([here.to_sparse(), here if r else here.to_sparse(), here])
    sums = comm.reduce_add_coalesced(inputs, devices[0])
    n = len(devices)
    sparse = torch.sparse_coo
    assert [t.layout for t in sums] == [sparse, sparse if n == 1 else torch.strided, torch.strided]
    for total in sums:
        assert torch.equal(total.to_dense().cpu(), n * dense)


def test_coalesced_errors_and_nothing(make_devices, put):
    names = make_devices(2)
    x, y = (put(torch.ones(2), d) for d in names)
    assert comm.reduce_add_coalesced([]) == () == comm.reduce_add_coalesced([[], []])
    for rows, text in (
        ([[x, x], [y]], "rank 1 has 1 tensors, but rank 0 has 2"),
        ([[], [y]], "rank 1 has 1 tensors, but rank 0 has 0"),
    ):
        with pytest.raises(ValueError, match=f"reduce_add_coalesced: {text}"):
            comm.reduce_add_coalesced(rows)
    with pytest.raises(ValueError, match="input 1 has invalid size: got 1, but expected 2"):
        comm.reduce_add_coalesced([[x, x], [y, y[:1]]], names[0])
    with pytest.raises(RuntimeError, match="reduce_add expects destination"):
        comm.reduce_add_coalesced([[torch.ones(2)], [torch.ones(2)]], 2)


# All-reduce


@pytest.mark.parametrize("dtype", ADDED, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
def test_all_reduce(devices, dtype, shape, put):
    tensors = terms_on(devices, put, dtype, *shape)
    expected = rank_order_sum(tensors)
    sums = comm.all_reduce(iter(tensors))
    assert isinstance(sums, tuple)
    for total, device in zip(sums, devices, strict=True):
        assert total.device == where(device) and same_bits(total, expected)
    outputs = [torch.full_like(t, 1) for t in tensors]
    assert all(a is b for a, b in zip(comm.all_reduce(tensors, out=outputs), outputs, strict=True))
    assert all(same_bits(o, expected) for o in outputs)
    assert comm.all_reduce(tensors, out=tensors)[0] is tensors[0]
    assert all(same_bits(t, expected) for t in tensors)


def test_all_reduce_of_one_tensor_is_a_copy(make_devices, put):
    x = put(torch.ones(2), make_devices(1)[0])
    (total,) = comm.all_reduce([x])
    assert torch.equal(total, x) and not overlap(total, x)


def test_all_reduce_errors(make_devices, put):
    names = make_devices(2)
    x, y = (put(torch.ones(2, 2), d) for d in names)
    with pytest.raises(ValueError, match="at least one tensor"):
        comm.all_reduce([])
    with pytest.raises(ValueError, match="input 1 has invalid size: got 1x2, but expected 2x2"):
        comm.all_reduce([x, y[:1]])
    with pytest.raises(ValueError, match="got 1 output tensors for 2 ranks"):
        comm.all_reduce([x, y], out=[x])
    with pytest.raises(RuntimeError, match=r"same shape.*index 1 has shape \[1, 2\]"):
        comm.all_reduce([x, y], out=[x, y[:1]])
    with pytest.raises(ValueError, match=r"index 1 has shape \[2, 2\] and strides \[1, 2\]"):
        comm.all_reduce([x, y], out=[x, y.t()])
    with pytest.raises(
        ValueError, match="expected all tensors on GPUs, but tensor at index 0 is on CPU"
    ):
        comm.all_reduce([torch.ones(1), _pretend_on_gpu()])
    assert torch.equal(x, torch.ones_like(x))


def _pretend_on_gpu():
    class OnGpu(torch.Tensor):
        is_cpu = False
        is_cuda = True
        device = torch.device("cuda:0")

    return torch.ones(1).as_subclass(OnGpu)
