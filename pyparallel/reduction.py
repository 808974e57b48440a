"""Which dtypes the core adds, and sums by torch for everything else."""

from collections.abc import Sequence

import torch
from torch import Tensor

# What the core calls the elements. Complex numbers are pairs of reals; the sum of unsigned integers
# has the bits of the signed sum.
_CORE_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint32: "int32",
    torch.uint64: "int64",
    torch.complex32: "float16",
    torch.complex64: "float32",
    torch.complex128: "float64",
}
_CORE_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


def core_dtype(dtype: torch.dtype) -> str | None:
    """Returns the core's name for elements of ``dtype``, or None where torch has to add them."""
    return _CORE_DTYPES.get(dtype)


def core_count(tensor: Tensor) -> int:
    """Returns how many elements of its core dtype a tensor has: two for a complex number."""
    return tensor.numel() * tensor.element_size() // _CORE_ITEMSIZE[_CORE_DTYPES[tensor.dtype]]


def add_with_torch(terms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a new tensor on ``device`` with the sum of the terms, added in the order given.

    Sparse terms give a sparse sum; next to dense ones they are made dense. Eight-bit floats are
    added in float32 and rounded once.
    """
    if len({t.layout for t in terms}) > 1:
        terms = [t.to_dense() for t in terms]
    dtype = terms[0].dtype
    with torch.no_grad():
        total = terms[0].to(device, non_blocking=True, copy=True)
        if dtype is torch.uint16:  # torch does not add it; the signed sum has the same bits
            total = total.view(torch.int16)
        elif dtype.is_floating_point and dtype.itemsize == 1:
            total = total.float()
        for term in terms[1:]:
            term = term.to(device, non_blocking=True)
            term = term.view(torch.int16) if dtype is torch.uint16 else term.to(total.dtype)
            total = total + term if total.layout is not torch.strided else total.add_(term)
        return total.view(dtype) if dtype is torch.uint16 else total.to(dtype)
