"""Collectives on tensors and arrays: the functions of ``torch.cuda.comm`` and ``all_reduce``.

Tensors are on GPUs, or on the CPU: then they belong to virtual devices, the tensor at position i to
rank i. NumPy and CuPy arrays are taken too, and results are of the kind of the first input.
Quantized tensors can be broadcast and nothing else (TypeError); masked arrays are refused.

On GPUs the calls are queued: they start after the current stream of every device involved, and what
these streams do next comes after them. Nothing is recorded for autograd; use
``pyparallel.DataParallel`` for that; tensors with a tangent of forward-mode AD are refused
(NotImplementedError). Arguments are checked before anything starts. Results on ranks
other than the source's are new memory.

Writing to ``out`` is an in-place operation to autograd: backward notices it, and an output that
requires a gradient is refused (RuntimeError) while gradients are on. Outputs share memory neither
with each other nor with an input (RuntimeError), except where said.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyparallel.checks import check_rows
from pyparallel.communicator import get_communicator
from pyparallel.devices import DeviceLike, host_if_minus_1, resolve_devices
from pyparallel.forward_ad import refuse_tangents
from pyparallel.interop import publish_output, published, to_kind_of, to_output, to_tensor
from pyparallel.outputs import broadcast_out, scatter_out
from pyparallel.placement import devices_of, gather_ranks, on_streams, reduce_ranks, with_source

__all__ = [
    "all_reduce",
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
]

# A torch tensor, a NumPy array or a CuPy array.
Array = TypeVar("Array")


def broadcast(
    tensor: Array,
    devices: Iterable[DeviceLike] | None = None,
    *,
    out: Sequence[Array] | None = None,
) -> tuple[Array, ...]:
    """Copies a tensor to several devices.

    Args:
        tensor: Any shape and dtype, on the CPU or a GPU. With virtual devices it belongs to the
            first of them.
        devices: The devices that get a copy. Exactly one of ``devices`` and ``out`` must be given.
        out: Contiguous tensors of the same shape and dtype to copy to. The one on the tensor's own
            device may be the tensor.

    Returns:
        One tensor a device. The one on the tensor's own device is ``tensor`` itself. With ``out``,
        those objects.

    Raises:
        RuntimeError: Both or none of ``devices`` and ``out``, a negative device, outputs of another
            shape.
        ValueError: No such device; an output of another dtype or not contiguous.
    """
    if (devices is None) == (out is None):
        raise RuntimeError(
            "Exactly one of 'devices' and 'out' must be specified, but got "
            f"devices={devices} and out={out}"
        )
    source = to_tensor(tensor)
    refuse_tangents("broadcast", (source,))
    if devices is None:
        return broadcast_out(source, list(out or ()))
    ranks = resolve_devices(devices, need_index=True)
    if not ranks:
        return ()
    original: Tensor | None = source
    if not source.is_cuda and ranks[0].kind == "cuda":
        # One copy from the host; the GPUs pass it on among themselves.
        original, source = None, source.detach().to(ranks[0].torch_device, non_blocking=True)
    ranks, root, added = with_source(source, ranks)
    rows = get_communicator(ranks).broadcast([source], root)
    copies = [row[0] for row in rows[1:]] if added else [row[0] for row in rows]
    return tuple(tensor if c is original else to_kind_of(tensor, c) for c in copies)


def broadcast_coalesced(
    tensors: Iterable[Array], devices: Iterable[DeviceLike], buffer_size: int = 10485760
) -> list[list[Array]]:
    """Copies many tensors to several devices, small ones together in flat buffers.

    Args:
        tensors: Tensors of any shapes and dtypes, sparse ones too, all on the first device.
        devices: The devices that get copies; the first one holds the tensors.
        buffer_size: Largest flat buffer in bytes; a larger tensor gets one of its own. Copies in
            one buffer share its memory, but have version counters of their own.

    Returns:
        For each device the list of copies, in the order of ``tensors``. The first list holds the
        tensors themselves.

    Raises:
        RuntimeError: No devices, or a tensor that is not on the first one.
    """
    arrays = list(tensors)
    ranks = resolve_devices(devices, need_index=True)
    if not ranks:
        raise RuntimeError("Expected at least one device to broadcast to")
    sources = [to_tensor(a) for a in arrays]
    if any(s.device != ranks[0].torch_device for s in sources):
        raise RuntimeError(f"All tensors must be on devices[0]: {ranks[0].index}")
    communicator = get_communicator(ranks)
    results: list[list[Any]] = [list(arrays) for _ in ranks]
    for group in _buffers(sources, buffer_size):
        rows = communicator.broadcast([sources[k] for k in group])
        for result, row in zip(results[1:], rows[1:], strict=True):
            for k, copy in zip(group, row, strict=True):
                result[k] = to_kind_of(arrays[k], copy)
    return results


def reduce_add(inputs: Iterable[Array], destination: DeviceLike | None = None) -> Array:
    """Sums tensors from several devices onto one of them.

    The order is that of ``inputs``, in float32 for 16-bit types and rounded once.
    ``torch.cuda.comm`` starts from the destination's tensor instead, so floats may differ from it
    in the last bits.

    Args:
        inputs: One tensor a device, of one shape and dtype, dense or sparse.
        destination: The device of the result, which must hold one of the inputs. An int counts
            devices of the kind of the inputs. Default: the current GPU, or virtual device 0.

    Returns:
        A new tensor; a single input is returned as it is.

    Raises:
        AssertionError: An input is on the CPU while others are on GPUs.
        ValueError: No inputs, or shapes or dtypes differ.
        RuntimeError: No input is on ``destination``.
    """
    arrays = list(inputs)
    tensors = [to_tensor(a) for a in arrays]
    if not tensors:
        raise ValueError("reduce_add expects at least one input")
    ranks, root = reduce_ranks(tensors, destination)
    if len(arrays) == 1:
        return arrays[0]
    (total,) = get_communicator(ranks).reduce_add([[t] for t in tensors], root)
    assert total is not None
    result: Array = to_kind_of(arrays[0], total)
    return result


def reduce_add_coalesced(
    inputs: Iterable[Iterable[Array]],
    destination: DeviceLike | None = None,
    buffer_size: int = 10485760,
) -> tuple[Array, ...]:
    """Sums many tensors from several devices onto one of them, small ones together.

    Args:
        inputs: For each device its tensors; those at one position have one shape and dtype. Where
            all of them are sparse the sum is sparse, where only some are it is dense.
        destination: As for ``reduce_add``.
        buffer_size: Largest flat buffer in bytes; a larger tensor gets one of its own.

    Returns:
        One new tensor for each position, with version counters of their own.

    Raises:
        AssertionError: Inputs are on the CPU while others are on GPUs.
        ValueError: Numbers of tensors, shapes or dtypes differ, or a tensor is not on the device of
            its list.
        RuntimeError: No list is on ``destination``.
    """
    arrays = [list(row) for row in inputs]
    rows = [[to_tensor(a) for a in row] for row in arrays]
    check_rows("reduce_add_coalesced", rows)
    columns = list(zip(*rows, strict=True))
    if not columns:
        return ()
    ranks, root = reduce_ranks(columns[0], destination)
    communicator = get_communicator(ranks)
    results: list[Any] = list(arrays[0])
    for group in _buffers(rows[0], buffer_size):
        sums = communicator.reduce_add([[row[k] for k in group] for row in rows], root)
        for k, total in zip(group, sums, strict=True):
            assert total is not None
            results[k] = to_kind_of(arrays[0][k], total)
    return tuple(results)


def all_reduce(
    tensors: Iterable[Array], *, out: Sequence[Array] | None = None
) -> tuple[Array, ...]:
    """Sums one tensor of each device onto all of them, added as ``reduce_add`` does.

    Args:
        tensors: One tensor a device, of one shape and dtype.
        out: One contiguous tensor a device to write to; each may be the device's own input.
            Default: new tensors.

    Returns:
        One sum a device, all with the same bits. With ``out``, those objects.

    Raises:
        ValueError: No tensors; numbers, dtypes or devices do not match; an output that is not
            contiguous.
        RuntimeError: An output has another shape.
    """
    arrays = list(tensors)
    sources = [to_tensor(a) for a in arrays]
    if not sources:
        raise ValueError("all_reduce expects at least one tensor")
    communicator = get_communicator(devices_of(sources))
    if out is None:
        sums = communicator.all_reduce(sources)
        return tuple(to_kind_of(a, s) for a, s in zip(arrays, sums, strict=True))
    outputs = [to_output(o, i) for i, o in enumerate(out)]
    communicator.all_reduce(sources, outputs)
    return published(list(out), outputs)


def scatter(
    tensor: Array,
    devices: Iterable[DeviceLike] | None = None,
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.cuda.Stream | None] | None = None,
    *,
    out: Sequence[Array] | None = None,
) -> tuple[Array, ...]:
    """Cuts a tensor into chunks and sends one to each device.

    Args:
        tensor: Any dtype, at least one dimension, on the CPU or a GPU. With virtual devices it
            belongs to the first.
        devices: The devices that get a chunk. Exactly one of ``devices`` and ``out`` must be given.
        chunk_sizes: Sizes along ``dim``, one a device. Default: those of ``torch.chunk``, which may
            give fewer chunks than there are devices.
        dim: The dimension to cut; negative ones count from the last.
        streams: The stream of each device on which its chunk arrives, instead of the current one.
            None in it keeps the current one. Whoever passes streams orders later use of the chunks.
        out: Contiguous tensors to copy the chunks to; their sizes along ``dim`` are the chunk
            sizes. The one on the tensor's own device may be its chunk of the tensor.

    Returns:
        One chunk a device, channels_last if the tensor is. The chunk on the tensor's own device is
        a view of the tensor. With ``out``, those objects.

    Raises:
        RuntimeError: Sizes that do not add up, wrong shapes of outputs, a stream of another device.
        ValueError: No such device; a wrong number of streams; an output of another dtype or not
            contiguous.
        IndexError: ``dim`` is out of range.
    """
    source = to_tensor(tensor)
    refuse_tangents("scatter", (source,))
    if out is not None:
        for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
            if value is not None:
                raise RuntimeError(
                    f"'{name}' must not be specified when 'out' is specified, but got "
                    f"{name}={value}"
                )
        return scatter_out(source, list(out), dim, streams)
    if devices is None:
        raise RuntimeError("Exactly one of 'devices' and 'out' must be specified, but got neither")
    ranks = resolve_devices(devices, need_index=True)
    if not ranks:
        raise RuntimeError("Expected at least one device to scatter to")
    # Detached, because a view of a leaf counts as requiring gradients even where none are recorded.
    source = source.detach()
    if chunk_sizes is None:
        sizes = [chunk.size(dim) for chunk in source.chunk(len(ranks), dim)]
    else:
        sizes = list(chunk_sizes)
        if len(sizes) != len(ranks):
            raise RuntimeError(
                "Expected devices and chunk_sizes to be of same length, but got "
                f"len(devices) = {len(ranks)} and len(chunk_sizes) = {len(sizes)}"
            )
    with on_streams(streams, ranks, source):
        if not source.is_cuda and ranks[0].kind == "cuda":
            chunks = get_communicator(ranks).scatter(source, sizes, dim, root=None)
        else:
            ranks, root, added = with_source(source, ranks)
            sizes = [0, *sizes] if added else sizes
            chunks = get_communicator(ranks).scatter(source, sizes, dim, root)[added:]
    return tuple(to_kind_of(tensor, chunk) for chunk in chunks)


def gather(
    tensors: Iterable[Array],
    dim: int = 0,
    destination: DeviceLike | None = None,
    *,
    out: Array | None = None,
) -> Array:
    """Joins tensors from several devices along one dimension on one device.

    Args:
        tensors: One tensor a device, of the same sizes except along ``dim``. Other dtypes than the
            first one's are converted to it.
        dim: The dimension to join; negative ones count from the last.
        destination: The device of the result, or "cpu". An int counts devices of the kind of the
            inputs; -1 for the CPU is deprecated. Default: the current GPU, or virtual device 0.
        out: A contiguous tensor of the joined size, on a GPU or the CPU, to write to instead.

    Returns:
        A new tensor, channels_last if all inputs are; or ``out``. A call to the CPU waits for its
        result.

    Raises:
        RuntimeError: No tensors, sizes that do not match, both ``destination`` and ``out``, CPU
            tensors among those of GPUs.
        ValueError: No such device; an output of another dtype or not contiguous.
        IndexError: ``dim`` is out of range.
    """
    if out is not None and destination is not None:
        raise RuntimeError(
            "'destination' must not be specified when 'out' is specified, but got "
            f"destination={destination}"
        )
    destination = host_if_minus_1(destination)
    arrays = list(tensors)
    sources = [to_tensor(a) for a in arrays]
    if not sources:
        raise RuntimeError("Expected at least one tensor to gather from")
    if out is None:
        ranks, root = gather_ranks(sources, destination)
        joined = get_communicator(ranks).gather(sources, dim, root)
        result: Array = to_kind_of(arrays[0], joined)
        return result
    output = to_output(out, 0)
    ranks, root = gather_ranks(sources, output.device)
    get_communicator(ranks).gather_into(sources, output, dim, root)
    publish_output(out, output)
    return out


def _buffers(tensors: Sequence[Tensor], buffer_size: int) -> list[list[int]]:
    """Groups positions of tensors of one dtype whose bytes fit into one buffer."""
    groups: list[list[int]] = []
    open_groups: dict[torch.dtype, tuple[list[int], int]] = {}
    for k, tensor in enumerate(tensors):
        nbytes = tensor.numel() * tensor.element_size()
        group, filled = open_groups.get(tensor.dtype, ([], 0))
        if not group or filled + nbytes > buffer_size:
            group, filled = [], 0
            groups.append(group)
        group.append(k)
        open_groups[tensor.dtype] = (group, filled + nbytes)
    return groups
