"""Scatter and gather of the communicator: any dimension, split, dtype and memory format."""

import pytest
import torch
from tensors import COPIED, overlap, same_bits, values

from pyparallel.communicator import get_communicator
from pyparallel.devices import resolve_devices

pytestmark = pytest.mark.usefixtures("poison")

SPLITS = [[5], [3, 2], [0, 5], [1, 1, 3], [2, 0, 3, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_scatter_and_gather_move_any_dtype(comm, devices, ranks, root, dtype, put):
    source = put(values(dtype, ranks * 3, 2), devices[root])
    pieces = comm.scatter(source, [3] * ranks, 0, root)
    for rank, piece in enumerate(pieces):
        assert piece.device == comm.devices[rank].torch_device and piece.dtype == dtype
        assert same_bits(piece, source[3 * rank : 3 * rank + 3])
    joined = comm.gather(pieces, 0, root)
    assert joined.device == source.device and same_bits(joined, source)
    assert not overlap(joined, source)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_scatter_and_gather_along_any_dimension(make_devices, put, sizes, dim, memory_format):
    names = make_devices(5)
    comm = get_communicator(resolve_devices(names))
    shape = [2, 3, 4, 3]
    shape[dim] = 5
    for root in (0, len(sizes) - 1, 4):
        source = put(values(torch.float32, *shape).to(memory_format=memory_format), names[root])
        pieces = comm.scatter(source, sizes, dim, root)
        assert [p.size(dim) for p in pieces] == sizes
        start = 0
        for rank, piece in enumerate(pieces):
            expected = source.narrow(dim, start, sizes[rank])
            start += sizes[rank]
            assert torch.equal(piece.cpu(), expected.cpu())
            if rank != root and piece.numel():
                assert piece.is_contiguous(memory_format=memory_format)
            assert piece.numel() == 0 or overlap(piece, source) == (rank == root)
        joined = comm.gather(pieces, dim, root)
        assert torch.equal(joined.cpu(), source.cpu())
        assert joined.is_contiguous(memory_format=memory_format)


def test_scatter_of_a_tensor_with_gaps(comm, devices, ranks, root, put):
    source = put(values(torch.float32, 2 * ranks, 8), devices[root])[:, ::2]
    pieces = comm.scatter(source, [2] * ranks, 0, root)
    assert torch.equal(torch.cat([p.cpu() for p in pieces]), source.cpu())
    assert pieces[root].data_ptr() == source[2 * root :].data_ptr()


def test_scatter_of_misaligned_odd_rows(comm, devices, ranks, root, put):
    source = put(values(torch.uint8, 7 * (3 * ranks) + 1), devices[root])[1:].view(7, 3 * ranks)
    pieces = comm.scatter(source, [3] * ranks, 1, root)
    assert torch.equal(torch.cat([p.cpu() for p in pieces], 1), source.cpu())
    assert torch.equal(comm.gather(pieces, 1, root).cpu(), source.cpu())


def test_gather_converts_to_the_first_dtype(comm, devices, ranks, put):
    dtypes = [torch.float64, torch.float32, torch.int32, torch.float16, torch.int64]
    tensors = [put(torch.full((2,), r).to(dtypes[r]), d) for r, d in enumerate(devices)]
    joined = comm.gather(tensors)
    assert joined.dtype == torch.float64
    assert joined.tolist() == [float(r) for r in range(ranks) for _ in range(2)]


@pytest.mark.behaviour(134)
def test_gather_keeps_channels_last_only_if_all_agree(make_devices, put):
    names = make_devices(2)
    comm = get_communicator(resolve_devices(names))
    x = values(torch.float32, 2, 3, 4, 4)
    last = x.to(memory_format=torch.channels_last)
    both = comm.gather([put(last, d) for d in names])
    assert both.is_contiguous(memory_format=torch.channels_last)
    one = comm.gather([put(last, names[0]), put(x, names[1])])
    assert one.is_contiguous() and torch.equal(one.cpu(), torch.cat([x, x]))


def test_root_none_means_host_memory(comm, devices, ranks):
    source = torch.arange(2.0 * ranks)
    pieces = comm.scatter(source, [2] * ranks, root=None)
    assert [p.device for p in pieces] == [d.torch_device for d in comm.devices]
    joined = comm.gather(pieces, root=None)
    assert joined.device.type == "cpu" and torch.equal(joined, source)
    out = torch.full_like(source, -1)
    comm.gather_into(pieces, out, root=None)
    assert torch.equal(out, source)


def test_gather_is_new_memory_even_for_one_tensor(comm, devices, put):
    x = put(torch.ones(3), devices[0])
    joined = comm.gather([x])
    assert torch.equal(joined, x) and not overlap(joined, x)
