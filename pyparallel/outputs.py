"""Broadcast and scatter to tensors that the caller gives: the ``out=`` of ``pyparallel.comm``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.checks import check_chunks, check_outputs, check_same_size
from pyparallel.communicator import get_communicator
from pyparallel.devices import Device
from pyparallel.interop import published, to_output
from pyparallel.placement import devices_of, on_streams, with_source


def broadcast_out(source: Tensor, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Copies ``source`` to every output; returns the outputs. See ``comm.broadcast``."""
    outputs, ranks = _outputs(source, arrays)
    if not ranks:
        return ()
    check_same_size(outputs, source)
    check_outputs("broadcast", outputs, ranks, source.dtype)
    if not source.is_cuda and ranks[0].kind == "cuda":
        with torch.no_grad():
            source = outputs[0].copy_(source, non_blocking=True)
    ranks, root, added = with_source(source, ranks)
    if added:
        # With a version counter of its own, since the source's rank counts as written.
        source = source.data.contiguous()
        outputs = [source, *outputs]
    get_communicator(ranks).broadcast_into(source, outputs, root)
    return published(arrays, outputs[1:] if added else outputs)


def scatter_out(
    source: Tensor,
    arrays: Sequence[Any],
    dim: int,
    streams: Sequence[torch.cuda.Stream | None] | None,
) -> tuple[Any, ...]:
    """Cuts ``source`` into the outputs; returns the outputs. See ``comm.scatter``."""
    if not arrays:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    outputs, ranks = _outputs(source, arrays)
    dim = check_chunks(outputs, source, dim)
    check_outputs("scatter", outputs, ranks, source.dtype)
    with on_streams(streams, ranks, source):
        if not source.is_cuda and ranks[0].kind == "cuda":
            chunks = source.detach().split_with_sizes([o.size(dim) for o in outputs], dim)
            with torch.no_grad():
                for output, chunk in zip(outputs, chunks, strict=True):
                    output.copy_(chunk, non_blocking=True)
            return published(arrays, outputs)
        ranks, root, added = with_source(source, ranks)
        if added:
            outputs = [source.data.narrow(dim, 0, 0).contiguous(), *outputs]
        get_communicator(ranks).scatter_into(source, outputs, dim, root)
    return published(arrays, outputs[added:])


def _outputs(source: Tensor, arrays: Sequence[Any]) -> tuple[list[Tensor], list[Device]]:
    """Returns the outputs as tensors, and their ranks."""
    outputs = [to_output(a, i) for i, a in enumerate(arrays)]
    if source.is_cuda or any(o.is_cuda for o in outputs):
        for i, output in enumerate(outputs):
            if not output.is_cuda:
                raise RuntimeError(
                    "Expected all output tensors to be CUDA tensors, but output tensor at index "
                    f"{i} has device '{output.device}'"
                )
    return outputs, devices_of(outputs)
