"""Memory layouts: strides that survive a transfer.

The core moves bytes. A tensor that fills one block of memory without gaps ("dense") is moved as it
lies, and its copy gets the same strides, so that channels_last stays channels_last. Anything else
is copied first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill one block of memory without gaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def dense(tensor: Tensor) -> Tensor:
    """Returns ``tensor``, or a contiguous copy where its memory cannot be moved as it lies.

    Lazily conjugated or negated tensors are copied, because their memory does not hold their
    values.
    """
    if is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.no_grad():
        return tensor.resolve_conj().resolve_neg().contiguous()


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a new contiguous tensor."""
    return ordered_strides(size, range(len(size)))


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns ``tensor``, or a copy on its own device, with dense memory of the given strides."""
    # The stride of a dimension of size 1 moves nothing.
    same = tensor.stride() == stride or all(
        have == want or size == 1
        for have, want, size in zip(tensor.stride(), stride, tensor.size(), strict=True)
    )
    if same and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.no_grad():
        copy = torch.empty_strided(tensor.size(), stride, dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)


def memory_order(tensor: Tensor) -> list[int]:
    """Returns the dimensions of a dense tensor, outermost in memory first."""
    size, stride = tensor.size(), tensor.stride()
    # A dimension of size 1 may have any stride. Placed inside its equals it keeps the stride that
    # it has.
    return sorted(range(tensor.dim()), key=lambda d: (-stride[d], size[d] == 1))


def ordered_strides(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns dense strides for dimensions that lie in memory in ``order``, outermost first."""
    strides = [1] * len(size)
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= max(size[d], 1)
    return tuple(strides)


def common_order(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the order of tensors joined: channels_last if all are, else contiguous."""
    dims = tensors[0].dim()
    if dims in (4, 5):
        channels_last = [0, *range(2, dims), 1]
        orders = [memory_order(t) for t in tensors if t.numel()]  # an empty one shows no order
        if orders and all(order == channels_last for order in orders):
            return channels_last
    return list(range(dims))
