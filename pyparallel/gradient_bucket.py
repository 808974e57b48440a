"""The sum of one bucket's gradients over all ranks: launched in backward, waited for later."""

import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pyparallel.accumulation import Accumulation
from pyparallel.communicator import Communicator
from pyparallel.flat import FlatLayout
from pyparallel.layout import with_strides
from pyparallel.reduction import core_dtype
from pyparallel.streams import current_streams

OptionalTensors = Sequence[Tensor | None]
_layout = attrgetter("layout")


class GradientBucket:
    """Sums gradients of the same parameters again and again.

    Args:
        communicator: Its rank 0 gets the sums.
        parameters: Dense tensors of one dtype.
        accumulation: Gradients that were kept on the ranks, and whether to keep more.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[Tensor],
        accumulation: Accumulation,
    ) -> None:
        self.communicator = communicator
        self.accumulation = accumulation
        self.count = len(parameters)
        self._layout = FlatLayout(parameters)
        self._strides = [p.stride() for p in parameters]
        self._all_strides = self._strides * len(communicator.devices)
        self._complex = parameters[0].is_complex()
        self._dtype = core_dtype(parameters[0].dtype)
        # (ticket, all that must stay as it is until the sum is done)
        self._running: list[tuple[int, Any]] = []
        self._waiting = threading.Lock()

    def launch(self, grads: OptionalTensors) -> list[Tensor | None]:
        """Starts to sum the gradients of rank 0, rank 1, ...

        Returns:
            New tensors with the strides of the parameters, None where no rank has a gradient. Their
            values are there after ``wait``. Nothing else refers to them, so autograd may keep them.
        """
        count = self.count
        terms, missing = self._terms(grads)
        if terms is None:
            rows = [grads[start : start + count] for start in range(0, len(grads), count)]
            return self.communicator.reduce_add(rows)
        devices = self.communicator.devices
        destination, sums = self._layout.allocate(devices[0].torch_device)
        moved = self._layout.nonempty
        if missing:
            pointers = [0 if term is None else term.data_ptr() for term in terms]
            absent = [i for i in range(count) if all(term is None for term in terms[i::count])]
            moved = [i for i in moved if i not in absent]
        else:
            absent = []
            pointers = list(map(Tensor.data_ptr, terms))
        if moved:
            offsets, sizes = self._layout.offsets, self._layout.nbytes
            whole = len(moved) == count
            ticket = self.communicator.core.reduce_add(
                0,
                [
                    pointers[start : start + count]
                    if whole
                    else [pointers[start + i] for i in moved]
                    for start in range(0, len(pointers), count)
                ],
                offsets if whole else [offsets[i] for i in moved],
                sizes if whole else [sizes[i] for i in moved],
                destination,
                self._dtype,
                current_streams(devices),
                asynchronous=True,
            )
            if ticket:
                # The storage, not the sums: autograd keeps them only if nobody else does.
                self._running.append((ticket, (terms, sums[moved[0]].untyped_storage())))
        if absent:
            return [None if i in absent else total for i, total in enumerate(sums)]
        return list(sums)

    def wait(self) -> None:
        """Returns when all sums launched so far are there. Raises what went wrong."""
        if not self._running:
            return
        # Another thread may wait for a sum of ours: it is in the list until it is done.
        with self._waiting:
            while self._running:
                ticket = self._running[0][0]
                try:
                    self.communicator.core.wait(ticket)
                finally:
                    del self._running[0]

    def _terms(self, grads: OptionalTensors) -> tuple[Sequence[Tensor | None] | None, bool]:
        """Returns gradients that the core can add, None where it cannot, and whether some lack."""
        if self._dtype is None:
            return None, False
        present = [grad for grad in grads if grad is not None]
        if any(layout is not torch.strided for layout in map(_layout, present)):
            return None, False
        missing = len(present) < len(grads)
        if (
            not missing
            and list(map(Tensor.stride, present)) == self._all_strides
            and not any(map(Tensor.is_neg, present))
            and not (self._complex and any(map(Tensor.is_conj, present)))
        ):
            return present, False
        return [
            None if grad is None else with_strides(grad, stride)
            for grad, stride in zip(grads, self._all_strides, strict=True)
        ], missing
