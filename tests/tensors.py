"""Values for tests of transfers, and what their results must be."""

import torch

COPIED = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def values(dtype, *shape, seed=0):
    """Reproducible values that every dtype holds exactly where it can."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def same_bits(a, b):
    """Whether two tensors hold the same bytes in the same logical order."""
    a, b = (t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def overlap(a, b):
    """Whether the storages of two tensors share memory."""
    a, b = a.untyped_storage(), b.untyped_storage()
    return a.data_ptr() < b.data_ptr() + b.nbytes() and b.data_ptr() < a.data_ptr() + a.nbytes()


def rank_order_sum(terms):
    """The bits that a sum must have: in rank order, in fp32 for 16-bit types, rounded once."""
    total = terms[0].cpu()
    wide = torch.float32 if total.dtype in (torch.float16, torch.bfloat16) else total.dtype
    total = total.to(wide)
    for term in terms[1:]:
        total = total + term.cpu().to(wide)
    return total.to(terms[0].dtype)
