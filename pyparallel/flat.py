"""Many tensors of one dtype in one flat buffer a rank: what broadcast and reduce_add move."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel import _C
from pyparallel.devices import Device
from pyparallel.layout import dense, with_strides
from pyparallel.reduction import core_dtype
from pyparallel.streams import current_streams

# Where a tensor starts in a flat buffer, in bytes: what the caching allocator of CUDA gives to a
# tensor of its own, so that kernels are as fast on a view of a flat buffer.
ALIGNMENT = 512

# Works below the dispatch key that ties a view to its base, or all views would share one version
# counter. ``.data`` does as much, in more than twice the time: with thousands of small tensors it
# takes longer than the transfer. But it is public, and this one may be gone in another torch.
_BelowViews: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)


class FlatLayout:
    """Where tensors of one dtype lie in a flat buffer, each aligned to ``ALIGNMENT`` bytes.

    Attributes:
        offsets: Byte offset of each tensor.
        nbytes: Bytes of each tensor.
        nonempty: Positions of the tensors that have any bytes to move.
        moved_offsets: Byte offset of each of those, as the core reads it fastest.
        moved_nbytes: Bytes of each of those.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Takes sizes, strides and dtype from dense tensors."""
        self._dtype = tensors[0].dtype
        self._itemsize = tensors[0].element_size()
        self._sizes = [t.size() for t in tensors]
        self._strides = [t.stride() for t in tensors]
        self.nbytes = [t.numel() * self._itemsize for t in tensors]
        self.nonempty = [i for i, n in enumerate(self.nbytes) if n]
        self.offsets: list[int] = []
        end = 0
        for n in self.nbytes:
            self.offsets.append(end)
            end += -(-n // ALIGNMENT) * ALIGNMENT
        self.moved_offsets = array("Q", [self.offsets[i] for i in self.nonempty])
        self.moved_nbytes = array("Q", [self.nbytes[i] for i in self.nonempty])
        self._starts = [offset // self._itemsize for offset in self.offsets]
        self._length = end // self._itemsize

    def allocate(self, device: torch.device) -> tuple[int, list[Tensor]]:
        """Returns the address of a new flat buffer, uninitialized, and the tensors in it.

        The tensors have version counters of their own: to autograd they are unrelated.
        """
        if len(self._sizes) == 1:
            alone = torch.empty_strided(
                self._sizes[0], self._strides[0], dtype=self._dtype, device=device
            )
            return alone.data_ptr(), [alone]
        flat = torch.empty(self._length, dtype=self._dtype, device=device)
        if _BelowViews is None:
            views = map(flat.as_strided, self._sizes, self._strides, self._starts)
            return flat.data_ptr(), [view.data for view in views]
        with _BelowViews():
            tensors = list(map(flat.as_strided, self._sizes, self._strides, self._starts))
        return flat.data_ptr(), tensors


def broadcast_flat(
    core: _C.Communicator,
    devices: Sequence[Device],
    sources: Sequence[Tensor],
    layout: FlatLayout,
    flats: Sequence[int],
    root: int,
    algorithm: str,
) -> None:
    """Copies the root's dense tensors into the flat buffers of the other ranks."""
    moved = layout.nonempty
    if moved and len(devices) > 1:
        core.broadcast(
            root,
            [sources[i].data_ptr() for i in moved],
            layout.moved_offsets,
            layout.moved_nbytes,
            flats,
            current_streams(devices),
            algorithm,
        )


def reduce_add_flat(
    core: _C.Communicator,
    devices: Sequence[Device],
    columns: Sequence[Sequence[Tensor | None]],
    root: int,
    algorithm: str,
) -> list[Tensor]:
    """Sums each column (one tensor or None a rank) into a new flat buffer of the root."""
    firsts = [dense(next(t for t in column if t is not None)) for column in columns]
    name = core_dtype(firsts[0].dtype)
    assert name is not None
    layout = FlatLayout(firsts)
    destination, sums = layout.allocate(devices[root].torch_device)
    moved = layout.nonempty
    # Temporary copies must live until the call has queued everything.
    terms = [
        [None if t is None else with_strides(t, firsts[i].stride()) for t in columns[i]]
        for i in moved
    ]
    if terms:
        core.reduce_add(
            root,
            [[0 if t is None else t.data_ptr() for t in row] for row in zip(*terms, strict=True)],
            layout.moved_offsets,
            layout.moved_nbytes,
            destination,
            name,
            current_streams(devices),
            algorithm,
        )
    return sums
