"""Broadcast of the communicator: values, layouts, alignment, memory of ranks."""

import pytest
import torch
from tensors import COPIED, overlap, same_bits, values

from pyparallel.communicator import get_communicator
from pyparallel.devices import resolve_devices

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_broadcast_moves_any_dtype(comm, devices, root, dtype, put):
    shapes = [(), (0,), (1,), (3,), (5, 7), (2, 0, 3), (1025,)]
    tensors = [put(values(dtype, *s, seed=i), devices[root]) for i, s in enumerate(shapes)]
    rows = comm.broadcast(tensors, root)
    assert len(rows) == len(devices)
    for rank, row in enumerate(rows):
        for source, copy in zip(tensors, row, strict=True):
            assert copy.size() == source.size() and copy.dtype == dtype
            assert copy.device == comm.devices[rank].torch_device
            assert same_bits(copy, source)
            assert (copy is source) == (rank == root)


def test_broadcast_of_mixed_dtypes_keeps_the_order(comm, devices, root, put):
    dtypes = [torch.float32, torch.int64, torch.complex64, torch.float32, torch.bool, torch.int64]
    tensors = [put(values(t, 3, seed=i), devices[root]) for i, t in enumerate(dtypes)]
    for row in comm.broadcast(tensors, root):
        assert [t.dtype for t in row] == dtypes
        assert all(same_bits(t, s) for t, s in zip(row, tensors, strict=True))


@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 4095, 65537, (1 << 20) + 3])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_broadcast_of_any_size_and_alignment(comm, devices, root, nbytes, offset, put):
    source = put(values(torch.uint8, nbytes + offset), devices[root])[offset:]
    for row in comm.broadcast([source, source], root):
        assert all(same_bits(copy, source) for copy in row)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, 6, 3, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_broadcast_keeps_the_strides_of_dense_tensors(comm, devices, root, layout, put):
    source = LAYOUTS[layout](put(values(torch.float32, 4, 6, 3, 5), devices[root]))
    other = torch.ones(3, device=source.device)
    dense = layout not in ("sliced", "expanded")
    for tensors in ([source], [other, source]):
        for row in comm.broadcast(tensors, root):
            copy = row[-1]
            assert torch.equal(copy.cpu(), source.cpu())
            assert copy is source or (
                copy.stride() == source.stride() if dense else copy.is_contiguous()
            )


def test_broadcast_copies_are_aligned_and_have_version_counters_of_their_own(
    comm, devices, root, put
):
    tensors = [put(torch.ones(n), devices[root]) for n in (1, 130, 3)]
    for rank, row in enumerate(comm.broadcast(tensors, root)):
        if rank == root:
            continue
        assert [t.storage_offset() * 4 for t in row] == [0, 512, 1536]
        assert len({t.untyped_storage().data_ptr() for t in row}) == 1
        versions = [t._version for t in row]
        row[0].add_(1)
        assert [t._version - v for t, v in zip(row, versions, strict=True)] == [1, 0, 0]
        assert all(t.is_leaf and not t.requires_grad and not t._is_view() for t in row)


def test_no_rank_shares_memory_with_another(comm, devices, root, put):
    tensors = [put(torch.ones(3), devices[root]), put(torch.ones(2), devices[root])]
    rows = comm.broadcast(tensors, root)
    for rank, row in enumerate(rows):
        for other in rows[:rank]:
            assert not any(overlap(a, b) for a in row for b in other)


@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conj", "neg"])
def test_broadcast_resolves_lazy_tensors(comm, devices, root, lazy, put):
    source = lazy(put(values(torch.complex64, 5), devices[root]))
    for row in comm.broadcast([source], root):
        assert torch.equal(row[0].cpu(), source.cpu())


def test_broadcast_of_sparse_tensors(comm, devices, root, put):
    dense = put(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), devices[root])
    sparse = dense.to_sparse()
    rows = comm.broadcast([dense, sparse, dense], root)
    for rank, row in enumerate(rows):
        assert row[1].layout == torch.sparse_coo and row[1].is_coalesced()
        assert torch.equal(row[1].to_dense().cpu(), dense.cpu())
        assert rank == root or row[1].values().data_ptr() != sparse.values().data_ptr()
        assert row[0].layout == row[2].layout == torch.strided


def test_broadcast_of_quantized_tensors():
    comm = get_communicator(resolve_devices(["cpu:0", "cpu:1"]))
    source = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.quint8)
    copy = comm.broadcast([source])[1][0]
    assert copy.q_scale() == 0.5 and torch.equal(copy.int_repr(), source.int_repr())
    assert copy.data_ptr() != source.data_ptr()


def test_broadcast_of_nothing(comm, ranks):
    assert comm.broadcast([]) == [[]] * ranks


def test_parameters_come_back_as_plain_tensors(comm, devices, root, put):
    parameter = torch.nn.Parameter(put(torch.ones(3), devices[root]))
    for rank, row in enumerate(comm.broadcast([parameter], root)):
        if rank != root:
            assert type(row[0]) is torch.Tensor and not row[0].requires_grad
