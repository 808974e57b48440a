"""Hooks of parameters that a backward did not reach are not called, as without buckets.

A node of the autograd graph that returns None for a tensor still makes the engine visit that
tensor, and call its hooks with None. The node of a bucket does so for every parameter that backward
did not reach while it reached others of the bucket. Without it the engine would not come by, so
hooks need not expect None, and as a rule cannot take it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def silence_hooks(nodes: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
    """Sees to it that the hooks of tensors do not see gradients that are not there.

    Called in backward.

    Args:
        nodes: Where each gradient goes.
        grads: What the running node is about to return; None where backward reached nothing.
    """
    for node, grad in zip(nodes, grads, strict=True):
        if grad is not None:
            continue
        # Only leaves, which are the tensors that a user's parameters are.
        tensor = getattr(node, "variable", None)
        if tensor is None or not (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            continue
        # Where the engine does not come by, nothing would put the hooks back.
        try:
            if torch._C._will_engine_execute_node(node):
                _Silenced(tensor, tensor._post_accumulate_grad_hooks)
        except RuntimeError:
            # autograd.grad returns this gradient: it calls the hooks, but accumulates nothing.
            _Silenced(tensor, None)


class _Silenced:
    """Stands in the place of all hooks of a tensor until the engine comes by."""

    def __init__(self, tensor: Tensor, hooks_after: dict[Any, Any] | None) -> None:
        self._before = _take(tensor._backward_hooks)
        self._after = _take(hooks_after)
        leaf: Any = tensor  # whose methods are not typed
        self._places = [leaf.register_hook(self._see_gradient)]
        if self._after:
            self._places.append(leaf.register_post_accumulate_grad_hook(self._see_tensor))
        self._tensor = tensor

    def _see_gradient(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            if not self._after:
                self._put_back()
            return None
        # An error kept the engine away, and this is another backward.
        self._put_back()
        for hook in self._before.values():
            changed = hook(grad)
            if changed is not None:
                grad = changed
        return grad

    def _see_tensor(self, tensor: Tensor) -> None:
        self._put_back()

    def _put_back(self) -> None:
        for place in self._places:
            place.remove()
        for hooks, kept in (
            (self._tensor._backward_hooks, self._before),
            (self._tensor._post_accumulate_grad_hooks, self._after),
        ):
            if hooks is not None and kept:
                # Those that were registered meanwhile come last.
                added = _take(hooks)
                hooks.update({**kept, **added})


def _take(hooks: dict[Any, Any] | None) -> dict[Any, Any]:
    """Empties a dict of hooks, and returns what was in it."""
    kept = dict(hooks or ())
    if hooks:
        hooks.clear()
    return kept
