"""Where tensors lie in memory, and whether they still do."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyparallel import _C

_Tensor: Any = torch._C.TensorBase


class AttributeLayouts:
    """As ``_C.TensorLayouts``, for versions of torch that do not offer the exchange API."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._strides = [tensor.stride() for tensor in tensors]
        self._seen = _C.AttributeSnapshot(
            tensors, [_Tensor.data_ptr, _Tensor.dtype, _Tensor.shape, _Tensor.stride]
        )

    def check(self) -> int:
        """Returns the position of the first tensor that changed, or -1."""
        return self._seen.check()

    def addresses_of(self, others: list[Tensor]) -> list[int] | None:
        """Returns the addresses of tensors with the same strides, otherwise None."""
        if any(tensor.layout is not torch.strided for tensor in others):
            raise RuntimeError("a tensor does not lie in memory")
        expected = self._strides * (len(others) // len(self._strides))
        if list(map(Tensor.stride, others)) != expected:
            return None
        return list(map(Tensor.data_ptr, others))


def layouts_of(tensors: Iterable[Tensor]) -> "_C.TensorLayouts | AttributeLayouts":
    """Looks at the layouts of strided tensors."""
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    return AttributeLayouts(list(tensors)) if api is None else _C.TensorLayouts(list(tensors), api)
