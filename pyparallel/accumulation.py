"""Gradients that stay on the ranks while ``no_sync`` is on, until the next sum."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from pyparallel.communicator import Communicator

OptionalTensors = Sequence[Tensor | None]


@dataclass
class _Kept:
    """Parts of a parameter's gradient.

    Attributes:
        terms: Those of rank 1, rank 2, ...
        seen: ``parameter.grad`` and its version when the backward that kept them had ended.
    """

    parameter: Tensor
    terms: list[Tensor | None]
    seen: tuple[weakref.ref[Tensor], int] | None = None

    def is_forgotten(self) -> bool:
        """Whether the user has set the gradient to None or, afterwards, to zeros."""
        grad = self.parameter.grad
        if grad is None or self.seen is None:
            return grad is None
        was, version = self.seen
        # Zeros that nobody wrote since are rank 0's own part.
        return (was() is not grad or grad._version != version) and not _any(grad)


class Accumulation:
    """Keeps gradients of ranks >= 1 by parameter. Rank 0's go where they always go.

    So meanwhile ``parameter.grad`` is rank 0's part. Setting it to None or to zeros, as
    ``zero_grad`` does, forgets the parts of the other ranks too.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._kept: dict[int, _Kept] = {}
        self._on = False

    def on(self) -> AbstractContextManager[None]:
        """Keeps what backward computes meanwhile."""
        return _On(self)

    def switch(self, on: bool) -> bool:
        """Starts or stops keeping gradients. Returns what was before."""
        before, self._on = self._on, on
        return before

    def exchange(
        self, leaves: Sequence[Any], grads: OptionalTensors
    ) -> tuple[OptionalTensors, bool]:
        """Keeps gradients, or gives back those kept.

        Args:
            leaves: The nodes that accumulate the gradients of a bucket's parameters.
            grads: The gradients of rank 0, rank 1, ...

        Returns:
            If gradients are kept: what the parameters get now, one for each, and False. Else the
            gradients of all ranks to be summed, and True.
        """
        if not self._on and not self._kept:
            return grads, True
        # With ``inputs``, backward leaves out the other parameters: what is kept of them stays.
        # autograd.grad accumulates into none.
        reached = [(j, leaf.variable) for j, leaf in enumerate(leaves) if _will_run(leaf)]
        if not reached:
            return grads, True
        count = len(leaves)
        merged = list(grads)
        if self._on:
            for j, parameter in reached:
                merged[j] = self._keep(parameter, grads[j::count])
            Variable._execution_engine.queue_callback(self._note_gradients)
            return merged[:count], False
        for j, parameter in reached:
            for rank, kept in enumerate(self._take(parameter), start=1):
                merged[rank * count + j] = _sum(kept, merged[rank * count + j])
        if self._kept:
            # Parameters that this backward does not reach get theirs when it has ended.
            Variable._execution_engine.queue_callback(self._deliver)
        return merged, True

    def _keep(self, parameter: Tensor, grads: OptionalTensors) -> Tensor | None:
        kept = self._take(parameter) or [None] * (len(grads) - 1)
        kept = [_sum(old, new) for old, new in zip(kept, grads[1:], strict=True)]
        if all(term is None for term in kept):
            return grads[0]
        self._kept[id(parameter)] = _Kept(parameter, kept)
        # A gradient of zeros, where rank 0 has none, tells a later zero_grad.
        return torch.zeros_like(parameter) if grads[0] is None else grads[0]

    def _take(self, parameter: Tensor) -> list[Tensor | None]:
        kept = self._kept.pop(id(parameter), None)
        return [] if kept is None or kept.is_forgotten() else kept.terms

    def _note_gradients(self) -> None:
        self._kept = {k: kept for k, kept in self._kept.items() if not kept.is_forgotten()}
        for kept in self._kept.values():
            grad = kept.parameter.grad
            assert grad is not None  # else it were forgotten
            kept.seen = weakref.ref(grad), grad._version

    def _deliver(self) -> None:
        for parameter in [kept.parameter for kept in self._kept.values()]:
            kept = self._take(parameter)
            if kept:
                rows: list[list[Tensor | None]] = [[None], *([term] for term in kept)]
                (total,) = self._communicator.reduce_add(rows)
                with torch.no_grad():
                    parameter.grad = _sum(parameter.grad, total)


class _On:
    # Not contextlib.contextmanager, which assigns to exceptions: some classes refuse that.
    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation

    def __enter__(self) -> None:
        self._before = self._accumulation.switch(True)

    def __exit__(self, *error: Any) -> None:
        self._accumulation.switch(self._before)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    with torch.no_grad():
        return b + a if a.is_sparse else a + b  # sparse + dense is not implemented


def _any(grad: Tensor) -> bool:
    return bool((grad.coalesce().values() if grad.is_sparse else grad).any())


def _will_run(leaf: Any) -> bool:
    if leaf is None:
        return False
    try:
        will_run: bool = torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad returns the gradient instead
        return False
    return will_run
