"""Gradients that stay on the ranks while ``no_sync`` is on, until the next sum."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from pyparallel.communicator import Communicator

OptionalTensors = Sequence[Tensor | None]


class Accumulation:
    """Keeps gradients of ranks >= 1 by parameter. Rank 0's go where they always go.

    So meanwhile ``parameter.grad`` is rank 0's part. Setting it to None, as ``zero_grad`` does,
    forgets the parts of the other ranks too.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._kept: dict[int, tuple[Tensor, list[Tensor | None]]] = {}
        self._on = False

    def on(self) -> AbstractContextManager[None]:
        """Keeps what backward computes meanwhile."""
        return _On(self)

    def switch(self, on: bool) -> bool:
        """Starts or stops keeping gradients. Returns what was before."""
        before, self._on = self._on, on
        return before

    def applies(self, leaves: Sequence[Any]) -> bool:
        """Whether a backward that accumulates into ``.grad`` has anything to do here.

        Args:
            leaves: The nodes that accumulate the gradients of a bucket's parameters.
        """
        return (self._on or bool(self._kept)) and any(map(_will_run, leaves))

    def exchange(
        self, leaves: Sequence[Any], grads: OptionalTensors
    ) -> tuple[OptionalTensors, bool]:
        """Keeps gradients, or gives back those kept.

        Args:
            leaves: The nodes of the parameters.
            grads: The gradients of rank 0, rank 1, ...

        Returns:
            If gradients are kept: what the parameters get now, one for each, and False. Else the
            gradients of all ranks to be summed, and True.
        """
        count = len(leaves)
        parameters = [leaf.variable for leaf in leaves]
        if self._on:
            return [self._keep(p, grads[j::count]) for j, p in enumerate(parameters)], False
        merged = list(grads)
        for j, parameter in enumerate(parameters):
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
        self._kept[id(parameter)] = parameter, kept
        # A gradient of zeros, where rank 0 has none, tells a later zero_grad.
        return torch.zeros_like(parameter) if grads[0] is None else grads[0]

    def _take(self, parameter: Tensor) -> list[Tensor | None]:
        _, kept = self._kept.pop(id(parameter), (None, []))
        return [] if parameter.grad is None else kept

    def _deliver(self) -> None:
        for parameter, _ in list(self._kept.values()):
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


def _will_run(leaf: Any) -> bool:
    if leaf is None:
        return False
    try:
        will_run: bool = torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad returns the gradient instead
        return False
    return will_run
