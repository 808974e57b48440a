"""Memory of the ranks that persists between forwards: copies of the module's tensors.

A copy is overwritten only while nobody needs its bytes. A graph, or the user, may hold copies from
an earlier forward, and no version counter tells that from a change of weights without an in-place
write (another Parameter object, ``p.data = other``). So before different bytes are written, the
references to the copies are counted. If there are more than our own, new memory is taken.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyparallel import _C
from pyparallel.communicator import Communicator
from pyparallel.flat import FlatLayout
from pyparallel.owned import OwnedTensors, storage_uses
from pyparallel.shells import as_type_of, copy_attributes
from pyparallel.streams import current_streams
from pyparallel.tensor_layouts import layouts_of

_Tensor: Any = torch._C.TensorBase


class RankMemory:
    """Copies of some tensors of one dtype, in one flat buffer a rank; rank 0 has the originals.

    Args:
        communicator: The ranks.
        members: The positions of the tensors in the module's list.
        tensors: The originals: all of them require a gradient, or none.
        written: Whether forward writes the tensors on every rank, as it does with buffers.

    Attributes:
        members: The positions of the tensors in the module's list.
        trainable: Whether the tensors require a gradient.
        copies: ``[rank][i]``, tensors without gradient; those of rank 0 are the originals.
        owned: The copies of the other ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        members: Sequence[int],
        tensors: Sequence[Tensor],
        written: bool,
    ) -> None:
        self.members = members
        self.trainable = tensors[0].requires_grad
        self._sent = self._skipped = 0  # by earlier tables, and without asking the table
        self._communicator = communicator
        self._layout = FlatLayout(tensors)
        self._nbytes = sum(self._layout.nbytes) * (len(communicator.devices) - 1)
        # On the host the copies are compared with the originals. On GPUs the root compares what it
        # sends with what it sent last, so it must be told where forward wrote a copy.
        self._compares = communicator.devices[0].kind == "cpu"
        self._written = written
        self._table: _C.SegmentTable | None = None
        self.copies: list[list[Tensor]] = [list(tensors)]
        self.renew()

    def rebase(self, tensors: Sequence[Tensor]) -> None:
        """Takes other originals of the same kinds."""
        self.copies[0] = list(tensors)
        self._sources = self._addresses()

    def send(self, always: bool, in_use: Callable[["RankMemory"], bool]) -> bool:
        """Makes the copies of all ranks equal to the originals.

        Args:
            always: Send also what did not change.
            in_use: Whether somebody uses a tensor on this memory other than its copies.

        Returns:
            Whether the copies are now other tensors than before, in new memory.
        """
        if not self._sources or len(self.copies) == 1:
            return False
        streams = current_streams(self._communicator.devices)
        if self._table is None or self._communicator.core is not self._core:  # after a fork
            self._make_table()
        assert self._table is not None
        always = always or (self._written and not self._compares)
        differ = always
        if self._compares and not always:
            differ = self._table.would_change(self._sources, streams)
            if not differ:
                self._skipped += self._nbytes
                return False
        # A GPU answers when it has done all earlier work, so it is asked only where it matters.
        renewed = (in_use(self) or self.held()) and (
            differ or self._table.would_change(self._sources, streams)
        )
        if renewed:
            self.renew()
        self._table.send(self._sources, streams, always)
        return renewed

    def transferred(self) -> tuple[int, int]:
        """Returns the bytes that went to the ranks so far, and those that they had already.

        On GPUs it waits for the last transfer, because the devices count.
        """
        sent, skipped = (0, 0) if self._table is None else self._table.transferred()
        return self._sent + sent, self._skipped + skipped

    def aliases(self, indices: Sequence[int]) -> list[list[Tensor]]:
        """Returns ``[rank >= 1][i]``: new tensors in place of some copies, on the same memory.

        They have their own version counters. Their references to the memory count as ours until
        ``forget``.
        """
        self._ours += len(indices)
        return [
            [as_type_of(self.copies[0][i], row[i].data) for i in indices] for row in self.copies[1:]
        ]

    def copy_attributes(self, index: int) -> None:
        """Gives all copies of a tensor the Python attributes of the original."""
        for row in self.copies[1:]:
            copy_attributes(self.copies[0][index], row[index])

    def forget(self, count: int) -> None:
        """Counts ``count`` aliases a rank no longer as ours."""
        self._ours -= count

    def held(self) -> bool:
        """Whether anybody but us refers to a copy, or to memory that holds one."""
        return self.owned.held() or self.memory_held()

    def memory_held(self) -> bool:
        """Whether there are more tensors in the memory than ours, or fewer."""
        return any(storage_uses(storage) != self._ours for storage in self._storages)

    def displaced(self) -> bool:
        """Whether a copy was moved to other memory, or spoiled by a forward."""
        return self._spoiled or (self.memory_held() and self._layouts.check() != -1)

    def check(self) -> None:
        """Finds out after a forward whether it spoiled a copy."""
        self._spoiled |= self._seen.check() != -1

    def spoil(self) -> None:
        """Notes that forward wrote an alias of a copy, if that would not be found anyhow."""
        self._spoiled |= not self._compares

    def renew(self) -> None:
        """Takes new memory, to which nothing was sent yet."""
        originals = self.copies[0]
        del self.copies[1:]
        self._flats = [0]
        self._storages: list[torch.UntypedStorage] = []
        # Tensors made in inference mode could never be saved for backward.
        with torch.inference_mode(False), torch.no_grad():
            for device in self._communicator.devices[1:]:
                address, copies = self._layout.allocate(device.torch_device)
                self.copies.append(list(map(as_type_of, originals, copies)))
                self._flats.append(address)
                self._storages.append(copies[0].untyped_storage())
                if device.kind == "cpu":  # a tenth of the time of sends that change everything
                    _C.advise_huge_pages(address, self._storages[-1].nbytes())
        others = list(chain.from_iterable(self.copies[1:]))
        self.owned = OwnedTensors(others)
        self._layouts = layouts_of(others)
        self._spoiled = False
        # Trainable ones are nobody's inputs where gradients are recorded.
        watched = [] if self.trainable else [_Tensor.requires_grad]
        if not self._compares and not self._written:
            watched.append(_Tensor._version)
        self._seen = _C.AttributeSnapshot(others, watched)
        self._ours = len(originals) + 1
        self._sources = self._addresses()
        self._make_table()

    def _addresses(self) -> "array[int]":
        return array("Q", [self.copies[0][i].data_ptr() for i in self._layout.nonempty])

    def _make_table(self) -> None:
        self._sent, self._skipped = self.transferred()
        self._core = self._communicator.core
        self._table = _C.SegmentTable(
            self._core,
            0,
            self._layout.moved_offsets,
            self._layout.moved_nbytes,
            self._flats,
        )
