"""Copies that persist lie on pages of 2 MiB where the system has them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pyparallel import _C, DataParallel, virtual_devices

PAGE = 2 << 20

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no such pages here"
)


def advised(address, nbytes):
    """Bytes of a range that may lie on such pages: flag "hg" of /proc/self/smaps."""
    total = start = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(word, 16) for word in words[0].split("-"))
        elif words[0] == "VmFlags:" and "hg" in words:
            total += max(0, min(end, address + nbytes) - max(start, address))
    return total


@needs_huge_pages
def test_whole_pages_inside_a_buffer():
    buffer = torch.empty(24 * PAGE, dtype=torch.uint8)
    start = -(-buffer.data_ptr() // PAGE) * PAGE
    _C.advise_huge_pages(start + 1, 2 * PAGE - 1)  # less than 4 MiB
    assert advised(start, 4 * PAGE) == 0
    _C.advise_huge_pages(start + 4096, 6 * PAGE - 8192)
    assert advised(start, PAGE) == 0 and advised(start + PAGE, 4 * PAGE) == 4 * PAGE
    assert advised(start + 5 * PAGE, PAGE) == 0


def test_contents_stay():
    buffer = torch.arange(3 * PAGE // 4)
    expected = buffer.clone()
    _C.advise_huge_pages(buffer.data_ptr(), buffer.nbytes)
    assert torch.equal(buffer, expected)
    _C.advise_huge_pages(0, 0)


@needs_huge_pages
def test_copies_of_parameters():
    module = nn.Linear(4096, 4096, bias=False)
    wrapper = DataParallel(module, virtual_devices(3))
    for replica in wrapper.replicate(module, wrapper.device_ids)[1:]:
        weight = replica.weight
        assert advised(weight.data_ptr(), weight.nbytes) >= weight.nbytes - 2 * PAGE
        assert torch.equal(weight, module.weight)
