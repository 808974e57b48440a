"""Sums of the communicator: bits, order, absent inputs, layouts, dtypes."""

import pytest
import torch
from tensors import overlap, rank_order_sum, same_bits, values

from pyparallel.communicator import get_communicator
from pyparallel.devices import resolve_devices

pytestmark = pytest.mark.usefixtures("poison")

ADDED_IN_FP32 = [torch.float16, torch.bfloat16, torch.float32]
ADDED_EXACTLY = [torch.int32, torch.int64, torch.int8, torch.int16, torch.uint8]


@pytest.mark.parametrize("dtype", [*ADDED_IN_FP32, torch.float64], ids=str)
def test_sums_of_floats(comm, devices, ranks, root, dtype, put):
    shapes = [(), (0,), (1,), (7, 5), (1025,), (70_001,)]
    inputs = [
        [put(values(dtype, *s, seed=10 * r + k), devices[r]) for k, s in enumerate(shapes)]
        for r in range(ranks)
    ]
    before = [[t.clone() for t in row] for row in inputs]
    sums = comm.reduce_add(inputs, root)
    for k, total in enumerate(sums):
        terms = [row[k] for row in inputs]
        assert total.dtype == dtype and total.device == comm.devices[root].torch_device
        assert same_bits(total, rank_order_sum(terms))
        reference = sum(t.cpu().double() for t in terms)
        bound = ranks * torch.finfo(dtype).eps * sum(t.cpu().double().abs() for t in terms)
        assert ((total.cpu().double() - reference).abs() <= bound).all()
    assert all(
        same_bits(a, b)
        for x, y in zip(inputs, before, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("dtype", ADDED_EXACTLY, ids=str)
def test_sums_of_integers_are_exact(comm, devices, ranks, root, dtype, put):
    inputs = [[put(torch.arange(10).to(dtype) + r, devices[r])] for r in range(ranks)]
    (total,) = comm.reduce_add(inputs, root)
    assert total.dtype == dtype
    expected = [ranks * i + ranks * (ranks - 1) // 2 for i in range(10)]
    assert total.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_sums_of_complex_numbers(comm, devices, ranks, root, dtype, put):
    inputs = [[put(values(dtype, 3, 5, seed=r), devices[r]).conj()] for r in range(ranks)]
    (total,) = comm.reduce_add(inputs, root)
    assert total.dtype == dtype
    assert same_bits(total, rank_order_sum([row[0].resolve_conj() for row in inputs]))


def test_unsigned_sums_wrap(comm, devices, ranks, put):
    for dtype, bits in ((torch.uint32, 32), (torch.uint64, 64)):
        signed = torch.int32 if bits == 32 else torch.int64
        inputs = [[put(torch.tensor([-1, 5], dtype=signed), d).view(dtype)] for d in devices]
        (total,) = comm.reduce_add(inputs)
        assert total.dtype == dtype and total.view(signed).tolist() == [-ranks, 5 * ranks]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_sums_round_once(devices, ranks, comm, dtype, put):
    # Half an ulp a rank: added one by one to 1 in 16 bits it would vanish each time.
    half_ulp = torch.finfo(dtype).eps / 2
    terms = [1.0] + [half_ulp] * (ranks - 1)
    inputs = [[put(torch.tensor([t], dtype=dtype), d)] for t, d in zip(terms, devices, strict=True)]
    (total,) = comm.reduce_add(inputs)
    expected = torch.tensor([sum(terms)], dtype=torch.float64).to(dtype)
    assert same_bits(total, expected)
    assert ranks < 3 or total.item() > 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_infinities_and_nan(comm, devices, ranks, dtype, put):
    terms = torch.tensor([float("inf"), float("nan"), -0.0, float("inf")], dtype=dtype)
    last = torch.tensor([1.0, 1.0, -0.0, -float("inf")], dtype=dtype)
    inputs = [[put(last if r and r == ranks - 1 else terms, d)] for r, d in enumerate(devices)]
    total = comm.reduce_add(inputs)[0].cpu()
    assert total[0].item() == float("inf") and total[1].isnan()
    assert total[2].item() == 0 and total[2].signbit()
    assert total[3].isnan() if ranks > 1 else total[3].item() == float("inf")


def test_the_order_of_a_sum_is_that_of_the_ranks_whatever_the_root(devices, put, make_devices):
    names = make_devices(3)
    comm = get_communicator(resolve_devices(names))
    terms = [1e8, 1.0, -1e8]
    inputs = [[put(torch.full((9,), t), d)] for t, d in zip(terms, names, strict=True)]
    for root in range(3):
        assert comm.reduce_add(inputs, root)[0].tolist() == [0.0] * 9


def test_absent_inputs_take_no_part(comm, devices, ranks, root, put):
    # Tensor k is held by the ranks r with r % (k + 2) == 0, the last one by nobody.
    inputs = [
        [put(torch.full((3,), r + 1.0), devices[r]) if r % (k + 2) == 0 else None for k in range(3)]
        + [None]
        for r in range(ranks)
    ]
    sums = comm.reduce_add(inputs, root)
    for k in range(3):
        expected = sum(r + 1.0 for r in range(ranks) if r % (k + 2) == 0)
        assert sums[k].tolist() == [expected] * 3
    assert sums[3] is None


def test_sums_have_the_strides_of_the_first_input(comm, devices, ranks, root, put):
    x = values(torch.float32, 2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    sliced = values(torch.float32, 2, 3, 4, 10)[..., ::2]
    inputs = [
        [
            put(last if r == 0 else x, d),
            put(x if r == 0 else last, d),
            put(x, d)[..., :4],
            put(x, d),
        ]
        for r, d in enumerate(devices)
    ]
    inputs[-1][3] = put(sliced, devices[-1])
    sums = comm.reduce_add(inputs, root)
    assert sums[0].stride() == last.stride() and sums[1].stride() == x.stride()
    assert sums[2].is_contiguous()
    for k, total in enumerate(sums):
        assert same_bits(total, rank_order_sum([row[k] for row in inputs]))


def test_autograd_may_keep_a_sum(comm, devices, root, put):
    inputs = [
        [put(torch.ones(3, requires_grad=True).detach(), d), put(torch.ones(2), d)] for d in devices
    ]
    first, second = comm.reduce_add(inputs, root)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    version = second._version
    first.add_(1)
    assert second._version == version
    assert not first._is_view() and not first.requires_grad
    assert not any(overlap(first, t) for row in inputs for t in row)


def test_sparse_sums(comm, devices, ranks, root, put):
    dense = torch.tensor([0.0, 1.0, 0.0, 2.0])
    inputs = []
    for r, d in enumerate(devices):
        sparse = put(dense * (r + 1), d).to_sparse()
        inputs.append([sparse, sparse if r == 0 else put(dense, d)])
    both, mixed = comm.reduce_add(inputs, root)
    weight = ranks * (ranks + 1) / 2
    assert both.layout == torch.sparse_coo
    assert both.to_dense().tolist() == [0, weight, 0, 2 * weight]
    assert mixed.to_dense().tolist() == [0, ranks, 0, 2 * ranks]
    assert mixed.layout == (torch.strided if ranks > 1 else torch.sparse_coo)


@pytest.mark.parametrize(
    "dtype", [*ADDED_IN_FP32, torch.float64, torch.int64, torch.int8, torch.complex64], ids=str
)
@pytest.mark.parametrize("size", [0, 1, 5, 1027, 66_000])
def test_all_reduce(comm, devices, ranks, dtype, size, put):
    tensors = [put(values(dtype, size, seed=r), d) for r, d in enumerate(devices)]
    before = [t.clone() for t in tensors]
    expected = rank_order_sum(tensors)
    for rank, total in enumerate(comm.all_reduce(tensors)):
        assert total.device == comm.devices[rank].torch_device
        assert same_bits(total, expected)
    assert all(same_bits(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_all_reduce_in_place_and_to_outputs(comm, devices, ranks, dtype, put):
    tensors = [put(values(dtype, 3, 5, seed=r), d) for r, d in enumerate(devices)]
    expected = rank_order_sum(tensors)
    outputs = [torch.full_like(t, 77) for t in tensors]
    assert all(a is b for a, b in zip(comm.all_reduce(tensors, outputs), outputs, strict=True))
    assert all(same_bits(o, expected) for o in outputs)
    comm.all_reduce(tensors, tensors)
    assert all(same_bits(t, expected) for t in tensors)


def test_all_reduce_keeps_channels_last(comm, devices, put):
    x = values(torch.float32, 2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = [put(x if r % 2 == 0 else x.contiguous(), d) for r, d in enumerate(devices)]
    for total in comm.all_reduce(tensors):
        assert total.stride() == x.stride() and same_bits(total, rank_order_sum(tensors))
