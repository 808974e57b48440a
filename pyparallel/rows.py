"""Pieces of a tensor as columns of a matrix of bytes: what scatter and gather move."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyparallel import _C
from pyparallel.devices import Device
from pyparallel.layout import ordered_strides, with_strides
from pyparallel.streams import current_streams


@dataclass(frozen=True)
class Rows:
    """A dense tensor as a matrix of bytes, whose rows are cut across by pieces along one dimension.

    Attributes:
        count: Rows.
        pitch: Bytes from one row to the next.
        unit: Bytes of a row for each index along the dimension.
    """

    count: int
    pitch: int
    unit: int

    @classmethod
    def along(cls, dim: int, size: Sequence[int], order: Sequence[int], itemsize: int) -> "Rows":
        """Returns the matrix of a tensor of this size and order for pieces along ``dim``."""
        position = order.index(dim)
        unit = math.prod(size[d] for d in order[position + 1 :]) * itemsize
        return cls(math.prod(size[d] for d in order[:position]), size[dim] * unit, unit)

    def shares(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns where successive pieces of these lengths start in a row, and their bytes."""
        offsets = []
        start = 0
        for length in lengths:
            offsets.append(start * self.unit)
            start += length
        return offsets, [length * self.unit for length in lengths]


def scatter_rows(
    core: _C.Communicator,
    devices: Sequence[Device],
    source: Tensor,
    order: Sequence[int],
    pieces: Sequence[Tensor],
    dim: int,
    root: int,
) -> None:
    """Fills the pieces of the first ranks, except the root's, with successive parts of ``source``.

    Source and pieces are dense and lie in memory in ``order``.
    """
    rows = Rows.along(dim, source.size(), order, source.element_size())
    absent = [0] * (len(devices) - len(pieces))
    offsets, sizes = rows.shares([piece.size(dim) for piece in pieces])
    destinations = [0 if r == root else piece.data_ptr() for r, piece in enumerate(pieces)]
    if any(destinations):
        core.scatter(
            root,
            source.data_ptr(),
            rows.count,
            rows.pitch,
            offsets + absent,
            sizes + absent,
            destinations + absent,
            current_streams(devices),
        )


def gather_rows(
    core: _C.Communicator,
    devices: Sequence[Device],
    tensors: Sequence[Tensor],
    result: Tensor,
    order: Sequence[int],
    dim: int,
    root: int,
) -> None:
    """Fills ``result`` on the root, dense and in ``order``, with the tensors of the first ranks."""
    converted = (t if t.dtype == result.dtype else t.detach().to(result.dtype) for t in tensors)
    sources = [with_strides(t, ordered_strides(t.size(), order)) for t in converted]
    rows = Rows.along(dim, result.size(), order, result.element_size())
    absent = [0] * (len(devices) - len(tensors))
    offsets, sizes = rows.shares([t.size(dim) for t in tensors])
    if result.numel():
        core.gather(
            root,
            [source.data_ptr() for source in sources] + absent,
            rows.count,
            rows.pitch,
            offsets + absent,
            sizes + absent,
            result.data_ptr(),
            current_streams(devices),
        )


def gather_on_host(tensors: Sequence[Tensor], result: Tensor, dim: int) -> None:
    """Fills ``result`` in host memory with the tensors of GPUs, and waits until it is there."""
    with torch.no_grad():
        places = result.split_with_sizes([t.size(dim) for t in tensors], dim)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
