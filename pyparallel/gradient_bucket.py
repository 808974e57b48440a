"""The sum of one bucket's gradients over all ranks: launched in backward, waited for later."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyparallel import _C
from pyparallel.accumulation import Accumulation
from pyparallel.communicator import Communicator
from pyparallel.flat import FlatLayout
from pyparallel.layout import with_strides
from pyparallel.reduction import core_dtype
from pyparallel.side_streams import SideStreams
from pyparallel.tensor_layouts import layouts_of

OptionalTensors = Sequence[Tensor | None]

# What sums may still use though nobody knows when they end: it is never freed.
_lost: list[Any] = []


class GradientBucket:
    """Sums gradients of the same parameters again and again.

    Args:
        communicator: Its rank 0 gets the sums.
        parameters: Dense tensors of one dtype.
        accumulation: Gradients that were kept on the ranks, and whether to keep more.

    Attributes:
        side: Where sums run on GPUs. Gradients are computed on the current streams.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[Tensor],
        accumulation: Accumulation,
    ) -> None:
        self.communicator = communicator
        self.accumulation = accumulation
        self.side = SideStreams(communicator.devices)
        self.count = len(parameters)
        self._layout = FlatLayout(parameters)
        self._strides = [p.stride() for p in parameters] * len(communicator.devices)
        self._layouts = layouts_of(parameters)
        self._complex = parameters[0].is_complex()
        self._dtype = core_dtype(parameters[0].dtype)
        # (the core that sums, ticket, all that must stay as it is until the sum is done)
        self._running: list[tuple[_C.Communicator, int, Any]] = []
        # The same of sums whose end is not known. They are done when a later one is.
        self._unsure: list[Any] = []
        self._waiting = threading.Lock()

    def launch(self, grads: OptionalTensors) -> list[Tensor | None]:
        """Starts to sum the gradients of rank 0, rank 1, ...

        Returns:
            New tensors with the strides of the parameters, None where no rank has a gradient. Their
            values are there after ``wait``, on GPUs for the side stream of rank 0. Nothing else
            refers to them, so autograd may keep them.
        """
        present = [grad for grad in grads if grad is not None]
        missing = len(present) < len(grads)
        try:
            addresses = None if missing else self._addresses(present)
        except RuntimeError:  # one of them does not lie in memory
            return self._sum_now(grads)
        strided = addresses is not None or all(g.layout is torch.strided for g in present)
        if self._dtype is None or not strided:
            return self._sum_now(grads)
        destination, sums = self._layout.allocate(self.communicator.devices[0].torch_device)
        moved = self._layout.nonempty
        results: list[Tensor | None] = list(sums)
        if addresses is None:
            terms = [
                None if grad is None else with_strides(grad, stride)
                for grad, stride in zip(grads, self._strides, strict=True)
            ]
            addresses = [0 if term is None else term.data_ptr() for term in terms]
            grads = terms
        if missing:
            for i in range(self.count):
                if all(grad is None for grad in grads[i :: self.count]):
                    results[i] = None
            moved = [i for i in moved if results[i] is not None]
        streams = self.side.follow(chain(grads, sums[:1]))
        # The storage, not the sums: autograd keeps them only if nobody else does.
        needed = (grads, sums[0].untyped_storage())
        self._start(addresses, moved, destination, streams, needed)
        return results

    def wait(self) -> None:
        """Returns when all sums launched so far are there. Raises what went wrong."""
        if not self._running:
            return
        # Another thread may wait for a sum of ours: it is in the list until it is done.
        with self._waiting:
            while self._running:
                core, ticket, needed = self._running[0]
                if core is self.communicator.core:  # a forked child has none of its parent's sums
                    try:
                        core.wait(ticket)
                    except RuntimeError:
                        # It failed, or it is late and still queued.
                        self._unsure.append(needed)
                        del self._running[0]
                        raise
                del self._running[0]
            self._unsure.clear()

    def __del__(self) -> None:
        # A backward that failed waits for none of its sums.
        with suppress(Exception):
            try:
                self.wait()
            finally:
                if self._running or self._unsure:
                    _lost.append((self._running, self._unsure))

    def _sum_now(self, grads: OptionalTensors) -> list[Tensor | None]:
        rows = [grads[at : at + self.count] for at in range(0, len(grads), self.count)]
        sums = self.communicator.reduce_add(rows)
        self.side.follow(sums)  # because results are expected there
        return sums

    def _addresses(self, grads: list[Tensor]) -> list[int] | None:
        """Returns the addresses of gradients that lie in memory as the parameters do, else None."""
        if any(map(Tensor.is_neg, grads)) or (self._complex and any(map(Tensor.is_conj, grads))):
            return None
        return self._layouts.addresses_of(grads)

    def _start(
        self,
        pointers: list[int],
        moved: list[int],
        destination: int,
        streams: list[int],
        needed: object,
    ) -> None:
        """Queues the sum of the tensors ``moved``; keeps what it needs until it is done."""
        if not moved:
            return
        offsets, sizes = self._layout.offsets, self._layout.nbytes
        rows = [pointers[at : at + self.count] for at in range(0, len(pointers), self.count)]
        if len(moved) < self.count:
            offsets, sizes, *rows = (
                [values[i] for i in moved] for values in (offsets, sizes, *rows)
            )
        assert self._dtype is not None
        core = self.communicator.core
        try:
            ticket = core.reduce_add(
                0,
                rows,
                offsets,
                sizes,
                destination,
                self._dtype,
                streams,
                asynchronous=True,
            )
            if ticket:
                self._running.append((core, ticket, needed))
        except BaseException:
            # An interrupt arrives when the call returns: the sum is queued, and its ticket lost.
            with suppress(RuntimeError):
                core.synchronize()
            raise
