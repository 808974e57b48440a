"""Forward-mode automatic differentiation, which would lose its tangents here."""

from collections.abc import Iterable

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
