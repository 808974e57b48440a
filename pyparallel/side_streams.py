"""Streams beside the compute streams of GPUs: what runs there keeps no computation waiting."""

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pyparallel.devices import Device


class SideStreams:
    """One stream for each GPU of some ranks, the same one for all who ask in this process.

    Virtual devices have none: for them nothing here does anything.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        gpus = dict.fromkeys(d.index for d in devices if d.kind == "cuda")
        self._streams = {index: _side_stream(index) for index in gpus}

    def on_root(self) -> AbstractContextManager[object]:
        """Makes the stream of rank 0's GPU the current one, as autograd notes it for new nodes."""
        if not self._streams:
            return nullcontext()
        return torch.cuda.stream(self._streams[self._devices[0].index])

    def follow(self, tensors: Iterable[Tensor | None]) -> list[int]:
        """Lets the streams wait for what the current ones have queued so far, not vice versa.

        Args:
            tensors: What will be used there. Because the current streams do not wait for that use,
                the allocator learns of it: memory freed earlier is given out again only after it.

        Returns:
            The handle of the stream of each rank, 0 for a virtual device.
        """
        for index, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(index))
        if self._streams:
            for tensor in tensors:
                if tensor is not None:
                    for part in _parts(tensor):
                        _record(part, self._streams)
        return [
            self._streams[d.index].cuda_stream if d.kind == "cuda" else 0 for d in self._devices
        ]


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    # The highest priority, because whole devices wait for a sum.
    return torch.cuda.Stream(device=index, priority=-1)  # type: ignore[no-untyped-call]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the strided tensors that a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _record(tensor: Tensor, streams: dict[int, torch.cuda.Stream]) -> None:
    tensor.record_stream(streams[tensor.device.index])
