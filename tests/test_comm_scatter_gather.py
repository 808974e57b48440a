"""comm.scatter and gather: torch's chunks, any dimension, outputs, destinations, error texts."""

import warnings

import pytest
import torch
from tensors import COPIED, overlap, same_bits, values

from pyparallel import comm

pytestmark = pytest.mark.usefixtures("poison")


def where(device):
    return torch.device("cpu" if device.startswith("cpu") else device)


@pytest.mark.behaviour(150)
@pytest.mark.parametrize("batch", [0, 1, 2, 5, 6, 9, 13])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_default_chunks_are_those_of_torch(devices, batch, dim, put):
    shape = [3, 3]
    shape[dim] = batch
    source = put(values(torch.float32, *shape), devices[0])
    expected = source.chunk(len(devices), dim)
    chunks = comm.scatter(source, devices, dim=dim)
    assert isinstance(chunks, tuple) and len(chunks) == len(expected)
    for i, (chunk, piece) in enumerate(zip(chunks, expected, strict=True)):
        assert chunk.device == where(devices[i])
        assert torch.equal(chunk.cpu(), piece.cpu()) and chunk.size() == piece.size()
        if chunk.numel():
            assert (chunk.data_ptr() == piece.data_ptr()) == (i == 0)
    joined = comm.gather(chunks, dim, devices[0])
    assert torch.equal(joined.cpu(), source.cpu()) and joined.size() == source.size()


@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_any_dtype(devices, dtype, put):
    source = put(values(dtype, 2 * len(devices), 3), devices[0])
    chunks = comm.scatter(source, devices)
    assert all(same_bits(c, source[2 * i : 2 * i + 2]) for i, c in enumerate(chunks))
    assert same_bits(comm.gather(chunks, 0, devices[0]), source)


@pytest.mark.behaviour(151)
@pytest.mark.parametrize("sizes", [[4, 0, 1], [0, 0, 5], [1, 3, 1]], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_chunk_sizes(make_devices, put, sizes, dim):
    names = make_devices(3)
    source = put(values(torch.float32, 5, 5), names[0])
    chunks = comm.scatter(source, names, iter(sizes), dim)
    for chunk, piece in zip(chunks, source.split_with_sizes(sizes, dim), strict=True):
        assert torch.equal(chunk.cpu(), piece.cpu())


def test_complex_is_cut_along_its_own_dimensions(devices, put):
    source = put(values(torch.complex64, 2, 2 * len(devices)), devices[0])
    chunks = comm.scatter(source, devices, dim=-1)
    assert all(c.dtype == torch.complex64 and c.size() == (2, 2) for c in chunks)
    assert torch.equal(comm.gather(chunks, -1, devices[0]).cpu(), source.cpu())


def test_channels_last_is_kept(devices, put):
    last = torch.channels_last
    source = put(
        values(torch.float32, 2 * len(devices), 3, 4, 4).to(memory_format=last), devices[0]
    )
    chunks = comm.scatter(source, devices)
    assert all(c.is_contiguous(memory_format=last) for c in chunks)
    joined = comm.gather(chunks, 0, devices[0])
    assert joined.is_contiguous(memory_format=last) and torch.equal(joined.cpu(), source.cpu())


def test_leaves_are_not_recorded(devices, put):
    leaf = put(torch.ones(len(devices), 2), devices[0]).requires_grad_()
    chunks = comm.scatter(leaf, devices)
    assert not any(c.requires_grad for c in chunks)
    assert not comm.gather([c.requires_grad_() for c in chunks], 0, devices[0]).requires_grad


@pytest.mark.behaviour(150)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_out(devices, dim, put):
    sizes = [3, 0, 1, 2, 4][: len(devices)]
    shape = [2, 2]
    shape[dim] = sum(sizes)
    source = put(values(torch.float32, *shape), devices[0])
    outputs = []
    for size, device in zip(sizes, devices, strict=True):
        shape[dim] = size
        outputs.append(put(torch.full(shape, -1.0), device))
    result = comm.scatter(source, dim=dim, out=outputs)
    assert all(r is o for r, o in zip(result, outputs, strict=True))
    assert torch.equal(torch.cat([o.cpu() for o in outputs], dim), source.cpu())
    assert outputs[0].numel() == 0 or not overlap(outputs[0], source)


def test_scatter_out_of_a_transposed_source(devices, put):
    source = put(values(torch.float32, 3, 2 * len(devices)), devices[0]).t()
    outputs = [put(torch.zeros(2, 3), d) for d in devices]
    comm.scatter(source, out=outputs)
    assert torch.equal(torch.cat([o.cpu() for o in outputs]), source.cpu())


def test_streams_of_virtual_devices_are_none():
    chunks = comm.scatter(torch.ones(2), ["cpu:0", "cpu:1"], streams=[None, None])
    assert len(chunks) == 2
    for streams in ([], [None], [None] * 3):
        text = f"scatter: got {len(streams)} streams for 2 ranks"
        with pytest.raises(ValueError, match=text):
            comm.scatter(torch.ones(2), ["cpu:0", "cpu:1"], streams=streams)
        with pytest.raises(ValueError, match=text):
            comm.scatter(torch.ones(2), streams=streams, out=[torch.ones(1), torch.ones(1)])


@pytest.mark.behaviour(150)
@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"devices": []}, RuntimeError, "Expected at least one device to scatter to"),
        ({}, RuntimeError, "Exactly one of 'devices' and 'out'"),
        (
            {"devices": ["cpu:0", "cpu:1"], "chunk_sizes": [4]},
            RuntimeError,
            r"Expected devices and chunk_sizes to be of same length, but got len\(devices\) = 2 "
            r"and len\(chunk_sizes\) = 1",
        ),
        ({"devices": ["cpu:0", "cpu:1"], "chunk_sizes": [1, 1]}, RuntimeError, "sum exactly to 4"),
        ({"devices": ["cpu:0"], "dim": 2}, IndexError, "Dimension out of range"),
        ({"devices": [-1]}, RuntimeError, "Expected non-negative device index, but got -1"),
        (
            {"devices": ["cpu:0"], "out": []},
            RuntimeError,
            "'devices' must not be specified when 'out' is specified, but got devices=",
        ),
        (
            {"chunk_sizes": [4], "out": []},
            RuntimeError,
            r"'chunk_sizes' must not be specified.*chunk_sizes=\[4\]",
        ),
        ({"out": []}, RuntimeError, "Expected at least one output tensor to scatter to"),
        (
            {"out": [torch.zeros(4)]},
            RuntimeError,
            r"Output tensor at index 0 has incorrect shape: \[4\]. Expected same shape except for "
            r"scatter dim 0 as the source tensor: \[4, 2\]",
        ),
        (
            {"out": [torch.zeros(2, 2), torch.zeros(2, 3)]},
            RuntimeError,
            r"index 1 has incorrect shape: \[2, 3\]",
        ),
        (
            {"out": [torch.zeros(2, 2), torch.zeros(1, 2)]},
            RuntimeError,
            "Total size for output tensors along scatter dim 0 does not match the source tensor "
            "size at dim 0. Expected 4, but got total size 3",
        ),
        (
            {"out": [torch.zeros(2, 4).t()]},
            ValueError,
            "contiguous output tensors, but output tensor at index 0",
        ),
        ({"out": [torch.zeros(4, 2).int()]}, ValueError, "index 0 has dtype torch.int32"),
    ],
)
def test_scatter_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        comm.scatter(torch.ones(4, 2), **arguments)


def test_scalars_cannot_be_cut():
    with pytest.raises(RuntimeError, match="chunk expects at least a 1-dimensional tensor"):
        comm.scatter(torch.tensor(1.0), ["cpu:0", "cpu:1"])
    with pytest.raises(RuntimeError, match="split expects at least a 1-dimensional tensor"):
        comm.scatter(torch.tensor(1.0), out=[torch.tensor(1.0)])


# Gather


@pytest.mark.behaviour(152)
def test_gather_destinations_of_virtual_devices(monkeypatch):
    tensors = [torch.full((1, 2), float(r)) for r in range(3)]
    expected = torch.cat(tensors)
    for destination in (None, 0, 2, "cpu", "cpu:1", torch.device("cpu")):
        joined = comm.gather(iter(tensors), 0, destination)
        assert torch.equal(joined, expected) and joined.device.type == "cpu"
    with pytest.raises(ValueError, match="cpu:3 is not there: there are 3 virtual devices"):
        comm.gather(tensors, 0, 3)
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "5")
    assert torch.equal(comm.gather(tensors, 0, 3), expected)


def test_minus_one_is_the_cpu_and_deprecated():
    with pytest.warns(
        FutureWarning, match="Using -1 to represent CPU tensor is deprecated"
    ) as caught:
        comm.gather([torch.ones(1)], 0, -1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm.gather([torch.ones(1)], 0, "cpu")


def test_gather_to_the_cpu(devices, put):
    joined = comm.gather(
        [put(torch.full((2,), float(r)), d) for r, d in enumerate(devices)], 0, "cpu"
    )
    assert joined.device.type == "cpu"
    assert joined.tolist() == [float(r) for r in range(len(devices)) for _ in range(2)]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_out(devices, dim, put):
    tensors = [put(values(torch.float32, 2, 2, seed=r), d) for r, d in enumerate(devices)]
    expected = torch.cat([t.cpu() for t in tensors], dim)
    for device in (devices[0], devices[-1], "cpu"):
        output = put(torch.full_like(expected, -1), device)
        assert comm.gather(tensors, dim, out=output) is output
        assert torch.equal(output.cpu(), expected)


@pytest.mark.behaviour(152)
def test_gather_errors(make_devices, put):
    names = make_devices(2)
    x, y = (put(torch.ones(2, 3), d) for d in names)
    cases = [
        (lambda: comm.gather([]), RuntimeError, "Expected at least one tensor to gather from"),
        (
            lambda: comm.gather([x, y[:, :2]]),
            RuntimeError,
            r"Input tensor at index 1 has invalid shape \[2, 2\], but expected \[2, 3\]",
        ),
        (
            lambda: comm.gather([x, y[0]]),
            RuntimeError,
            "Expected all input tensors to have the same number of dimensions, but tensor at index "
            r"1 ?has 1 dimensions, \(expected 2\)",
        ),
        (lambda: comm.gather([x, y], 2), IndexError, "Dimension out of range"),
        (lambda: comm.gather([x, y], -3), IndexError, "Dimension out of range"),
        (
            lambda: comm.gather([x, y], 0, "cpu", out=x),
            RuntimeError,
            "'destination' must not be specified when 'out' is specified, but got destination=cpu",
        ),
        (
            lambda: comm.gather([x, y], out=x),
            RuntimeError,
            r"Expected out tensor to have shape \[4, 3\], but got \[2, 3\]",
        ),
        (
            lambda: comm.gather([x, y], out=torch.zeros(3, 4, device=x.device).t()),
            ValueError,
            "contiguous output tensors",
        ),
        (lambda: comm.gather([x, y], out=torch.zeros(4, 3).int()), ValueError, "torch.int32"),
        (
            lambda: comm.gather([torch.ones(1), torch.ones(1)], 0, "cuda:0"),
            RuntimeError,
            "Expected all input tensors to be CUDA tensors, but tensor at index 0 has device cpu",
        ),
        (lambda: comm.gather([x, y], 0, "cpu:x"), RuntimeError, "cpu:x"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
