"""comm.broadcast and broadcast_coalesced: results of torch.cuda.comm, its error texts, outputs."""

import pytest
import torch
from tensors import COPIED, overlap, same_bits, values

from pyparallel import comm

pytestmark = pytest.mark.usefixtures("poison")


def where(device):
    return torch.device("cpu" if device.startswith("cpu") else device)


@pytest.mark.behaviour(143)
@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_broadcast(devices, dtype, put):
    source = put(values(dtype, 3, 5), devices[0])
    copies = comm.broadcast(source, devices)
    assert isinstance(copies, tuple) and len(copies) == len(devices)
    assert copies[0] is source
    for copy, device in zip(copies, devices, strict=True):
        assert copy.device == where(device) and copy.dtype == dtype
        assert copy.size() == source.size() and same_bits(copy, source)
    for copy in copies[1:]:
        assert not overlap(copy, source)


@pytest.mark.behaviour(146)
def test_broadcast_keeps_channels_last(devices, put):
    source = put(
        values(torch.float32, 2, 3, 4, 4).to(memory_format=torch.channels_last), devices[0]
    )
    assert all(c.stride() == source.stride() for c in comm.broadcast(source, devices))


@pytest.mark.behaviour(146)
def test_complex_tensors_stay_complex(devices, put):
    source = put(values(torch.complex64, 4), devices[0]).conj()
    for copy in comm.broadcast(source, devices):
        assert copy.dtype == torch.complex64 and torch.equal(copy.cpu(), source.cpu())


def test_a_leaf_may_be_broadcast(devices, put):
    leaf = put(torch.ones(3), devices[0]).requires_grad_()
    copies = comm.broadcast(leaf, devices)
    assert copies[0] is leaf and not any(c.requires_grad for c in copies[1:])


def test_ints_and_bare_names(monkeypatch):
    x = torch.arange(3.0)
    assert len(comm.broadcast(x, ["cpu"] * 3)) == 3
    assert len(comm.broadcast(x, [torch.device("cpu")] * 2)) == 2
    assert comm.broadcast(x, []) == ()
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "2")
    copies = comm.broadcast(x, (i for i in (1, 0)))
    assert copies[0] is x and torch.equal(copies[1], x)
    with pytest.raises(ValueError, match="cpu:2 is not there"):
        comm.broadcast(x, [0, 2])


@pytest.mark.behaviour(143)
def test_exactly_one_of_devices_and_out():
    x = torch.ones(1)
    with pytest.raises(
        RuntimeError,
        match="Exactly one of 'devices' and 'out' must be specified, but got devices=None "
        "and out=None",
    ):
        comm.broadcast(x)
    with pytest.raises(RuntimeError, match=r"but got devices=\['cpu:0'\] and out=\[tensor"):
        comm.broadcast(x, ["cpu:0"], out=[x])


@pytest.mark.behaviour(145)
@pytest.mark.parametrize(
    "devices, error, text",
    [
        ([-1], RuntimeError, "Expected non-negative device index, but got -1"),
        (
            ["cuda"],
            ValueError,
            "Expected a torch.device with a specified index or an integer, but got:cuda",
        ),
        ([0.5], ValueError, "with a specified index or an integer, but got:0.5"),
        (["meta"], ValueError, "but got: meta"),
    ],
)
def test_bad_devices(devices, error, text):
    with pytest.raises(error, match=text):
        comm.broadcast(torch.ones(1), devices)


@pytest.mark.behaviour(154)
def test_bad_sources():
    with pytest.raises(
        ValueError, match="expected a tensor of rank 0 on cpu:0, but got one on meta"
    ):
        comm.broadcast(torch.ones(1, device="meta"), ["cpu:0", "cpu:1"])
    with pytest.raises(TypeError, match="but got list"):
        comm.broadcast([1.0], ["cpu:0"])


@pytest.mark.behaviour(144)
@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_out(devices, dtype, put):
    source = put(values(dtype, 3, 5), devices[0])
    outputs = [put(values(dtype, 3, 5, seed=9), d) for d in devices]
    result = comm.broadcast(source, out=outputs)
    assert all(r is o for r, o in zip(result, outputs, strict=True))
    assert all(same_bits(o, source) for o in outputs)


def test_out_from_a_transposed_source_and_with_the_source_among_them(devices, put):
    source = put(values(torch.float32, 4, 3), devices[0]).t()
    outputs = [put(torch.zeros(3, 4), d) for d in devices]
    comm.broadcast(source, out=outputs)
    assert all(torch.equal(o.cpu(), source.cpu()) for o in outputs)
    outputs = [put(torch.zeros(3, 4), d) for d in devices]
    outputs[0] = put(torch.arange(12.0).view(3, 4), devices[0])
    comm.broadcast(outputs[0], out=outputs)
    assert all(torch.equal(o.cpu(), torch.arange(12.0).view(3, 4)) for o in outputs)
    assert comm.broadcast(source, out=[]) == ()


@pytest.mark.behaviour(144)
def test_bad_outputs(make_devices, put):
    names = make_devices(2)
    x, good = put(torch.ones(2, 3), names[0]), put(torch.zeros(2, 3), names[0])
    bad = put(torch.zeros(2, 4), names[1])
    with pytest.raises(
        RuntimeError,
        match=r"Expected all output tensors to have same shape as the source tensor \[2, 3\], but "
        r"output tensor at index 1 has shape \[2, 4\]",
    ):
        comm.broadcast(x, out=[good, bad])
    with pytest.raises(
        ValueError, match=r"contiguous output tensors, but output tensor at index 1"
    ):
        comm.broadcast(x, out=[good, bad[:, ::2].expand(2, 2)[:, :1].expand(2, 3)])
    with pytest.raises(ValueError, match="at index 1 has dtype torch.float64.*torch.float32"):
        comm.broadcast(x, out=[good, good.double()])
    assert not good.any()


# Coalesced


@pytest.mark.behaviour(96, 98, 147)
def test_coalesced_mixed_dtypes_and_layouts(devices, put):
    sources = [
        put(values(torch.float32, 7), devices[0]),
        put(values(torch.int64, 2, 3), devices[0]),
        put(torch.eye(3), devices[0]).to_sparse(),
        put(values(torch.float32, 0), devices[0]),
        put(values(torch.complex64, 5), devices[0]),
        put(values(torch.float32, 3, 3), devices[0]).t(),
        put(values(torch.float32), devices[0]),
    ]
    for buffer_size in (10485760, 32, 1):
        rows = comm.broadcast_coalesced(sources, devices, buffer_size)
        assert isinstance(rows, list) and len(rows) == len(devices)
        assert all(a is b for a, b in zip(rows[0], sources, strict=True))
        for row, device in zip(rows, devices, strict=True):
            for copy, source in zip(row, sources, strict=True):
                assert copy.dtype == source.dtype and copy.layout == source.layout
                assert copy.device == where(device)
                assert torch.equal(copy.to_dense().cpu(), source.to_dense().cpu())


@pytest.mark.parametrize(
    "buffer_size, buffers", [(10485760, [0, 0, 0, 0]), (800, [0, 0, 1, 2]), (1, [0, 1, 2, 3])]
)
def test_buffer_size_bounds_what_shares_memory(make_devices, put, buffer_size, buffers):
    names = make_devices(2)
    sources = [put(torch.ones(100), names[0]) for _ in range(4)]  # 400 bytes each
    sources[3] = put(torch.ones(300), names[0])
    copies = comm.broadcast_coalesced(sources, names, buffer_size)[1]
    storages = [c.untyped_storage().data_ptr() for c in copies]
    assert [list(dict.fromkeys(storages)).index(s) for s in storages] == buffers


@pytest.mark.behaviour(147)
def test_coalesced_version_counters(make_devices, put):
    names = make_devices(2)
    row = comm.broadcast_coalesced([put(torch.ones(3), names[0]) for _ in range(3)], names)[1]
    versions = [t._version for t in row]
    row[1].mul_(2)
    assert [t._version - v for t, v in zip(row, versions, strict=True)] == [0, 1, 0]


@pytest.mark.behaviour(100)
def test_coalesced_of_nothing(devices):
    assert comm.broadcast_coalesced([], devices) == [[] for _ in devices]


@pytest.mark.behaviour(97)
def test_coalesced_errors(make_devices, put):
    names = make_devices(2)
    x = put(torch.ones(1), names[0])
    with pytest.raises(RuntimeError, match=r"All tensors must be on devices\[0\]: 0"):
        comm.broadcast_coalesced([x, torch.ones(1, device="meta")], names)
    with pytest.raises(RuntimeError, match="at least one device"):
        comm.broadcast_coalesced([x], [])
