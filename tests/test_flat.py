"""Flat buffers: where tensors lie, and that copies and sums go there."""

import subprocess
import sys

import pytest
import torch

from pyparallel.flat import ALIGNMENT, FlatLayout

CPU = torch.device("cpu")


@pytest.mark.behaviour(95)
def test_offsets_are_aligned_and_do_not_overlap():
    layout = FlatLayout([torch.empty(n, dtype=torch.float64) for n in (1, 0, 64, 65, 3)])
    assert layout.nbytes == [8, 0, 512, 520, 24]
    assert layout.offsets == [0, 512, 512, 1024, 2048]
    assert layout.nonempty == [0, 2, 3, 4]
    assert layout.moved_offsets.tolist() == [0, 512, 1024, 2048]
    assert layout.moved_nbytes.tolist() == [8, 512, 520, 24]


@pytest.mark.behaviour(95)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.complex128])
def test_tensors_lie_at_their_offsets(dtype):
    tensors = [
        torch.empty(3, dtype=dtype),
        torch.empty(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        torch.empty((), dtype=dtype),
        torch.empty(0, 2, dtype=dtype),
    ]
    layout = FlatLayout(tensors)
    address, copies = layout.allocate(CPU)
    for tensor, copy, offset in zip(tensors, copies, layout.offsets, strict=True):
        assert copy.dtype == dtype and copy.size() == tensor.size()
        assert copy.stride() == tensor.stride()
        assert offset % ALIGNMENT == 0
        assert copy.numel() == 0 or copy.data_ptr() == address + offset
    again, _ = layout.allocate(CPU)
    assert again != address


@pytest.mark.parametrize(
    "tensor", [torch.empty(3, 4).t(), torch.empty(()), torch.empty(0)], ids=str
)
def test_one_tensor_has_memory_of_its_own(tensor):
    address, (copy,) = FlatLayout([tensor]).allocate(CPU)
    assert copy.data_ptr() == address and copy.stride() == tensor.stride()
    assert copy.untyped_storage().nbytes() == tensor.numel() * 4


def test_large_buffers_are_counted_in_64_bits():
    layout = FlatLayout([torch.empty(3 << 30, dtype=torch.int8, device="meta")] * 3)
    assert layout.offsets == [0, 3 << 30, 6 << 30]


@pytest.mark.parametrize("private", [True, False], ids=["private", "public"])
def test_tensors_are_unrelated_to_autograd(private, monkeypatch):
    if not private:  # a torch without the function we prefer
        monkeypatch.setattr("pyparallel.flat._BelowViews", None)
    tensors = [torch.empty(3), torch.empty(2, 2).t()]
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            _, (first, second) = FlatLayout(tensors).allocate(CPU)
        assert first._base is None and second._base is None
        assert first.is_leaf and not first.requires_grad and not first.is_inference()
        weight = torch.ones(3, requires_grad=True)
        product = (weight * first.zero_()).sum()
        second.add_(1)  # would spoil the saved tensor if the version counter were shared
        product.backward()
        assert weight.grad.tolist() == [0, 0, 0]
        first.requires_grad_().sum().backward()
        assert first.grad.tolist() == [1, 1, 1]


def test_a_torch_without_the_private_function(tmp_path):
    """The import and a broadcast work, with the same memory."""
    script = """
import torch
del torch._C._AutoDispatchBelowADInplaceOrView
from pyparallel import flat, virtual_devices
from pyparallel.comm import broadcast_coalesced
assert flat._BelowViews is None
tensors = [torch.arange(6.0).view(2, 3).t(), torch.ones(2)]
copies = broadcast_coalesced(tensors, virtual_devices(2))[1]
assert all(map(torch.equal, copies, tensors))
assert [c.stride() for c in copies] == [t.stride() for t in tensors]
assert copies[1].data_ptr() == copies[0].data_ptr() + flat.ALIGNMENT
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
