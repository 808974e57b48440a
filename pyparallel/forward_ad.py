"""What the core cannot carry: tangents of forward-mode AD, and tensors of other transforms."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_tangents(operation: str, tensors: Iterable[Tensor]) -> None:
    """Raises NotImplementedError if a tensor has a tangent: the core moves the values alone."""
    # -1 outside of every dual_level(), where no tensor has a tangent.
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        # A sparse tensor cannot have one.
        if tensor.layout is not torch.strided:
            continue
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(
                f"Trying to use forward AD with {operation} that does not support it because it "
                f"has not been implemented yet: a tensor of shape {list(tensor.shape)} has a "
                "tangent. Call the module without DataParallel, or use backward."
            )


def refuse_transforms() -> None:
    """Raises NotImplementedError inside ``torch.func.vmap``, ``grad``, ``jvp`` and their kin."""
    if _current_level() is not None:
        raise NotImplementedError(
            "DataParallel on several devices cannot be transformed by torch.func (vmap, grad, "
            "jvp, ...): transform the module that it wraps"
        )


def refuse_transformed(operation: str, tensor: Tensor) -> None:
    """Raises NotImplementedError for a tensor that stands for many, or for more than its values."""
    if _is_wrapped(tensor) or _is_batched(tensor):
        raise NotImplementedError(
            f"{operation}: a tensor of shape {list(tensor.shape)} belongs to a transform, such as "
            "torch.func.vmap or is_grads_batched=True, and cannot go to other devices: transform "
            "the module that is wrapped"
        )


# Private, so they may go; then errors are less clear.
_functorch: Any = getattr(torch._C, "_functorch", None)
_current_level: Any = getattr(_functorch, "maybe_current_level", lambda: None)
_is_wrapped: Any = getattr(_functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
_is_batched: Any = getattr(_functorch, "is_legacy_batchedtensor", lambda tensor: False)
