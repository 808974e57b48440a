"""Checks: what they let through, and messages with values."""

import pytest
import torch

from pyparallel import checks
from pyparallel.devices import Device

CPU = Device("cpu", 1)


def test_ranks_and_counts():
    checks.check_rank("op", 2, 3)
    checks.check_count("op", "inputs", 3, 3)
    with pytest.raises(ValueError, match="op: root 3 is not one of the 3 ranks"):
        checks.check_rank("op", 3, 3)
    with pytest.raises(ValueError, match="op: got 2 inputs for 3 ranks"):
        checks.check_count("op", "inputs", 2, 3)


def test_tensors():
    checks.check_tensor("op", torch.ones(1), 0, CPU)
    with pytest.raises(TypeError, match="op: rank 4 has a float, not a tensor"):
        checks.check_tensor("op", 1.0, 4, CPU)
    with pytest.raises(ValueError, match="tensor of rank 0 on cuda:1, but got one on cpu"):
        checks.check_tensor("op", torch.ones(1), 0, Device("cuda", 1))


def test_terms():
    x = torch.ones(2)
    assert checks.check_terms("op", [None, x, None], [CPU] * 3) == [x]
    assert checks.check_terms("op", [None, None], [CPU] * 2) == []
    with pytest.raises(ValueError, match="input 2 has invalid size: got , but expected 2"):
        checks.check_terms("op", [None, x, x.sum()], [CPU] * 3)


def test_pieces():
    tensors = [torch.empty(2, 3), torch.empty(2, 0), torch.empty(2, 4)]
    assert checks.check_pieces(tensors, -1) == (1, [2, 7])
    with pytest.raises(
        RuntimeError, match=r"index 1 has invalid shape \[2, 0\], but expected \[2, 3\]"
    ):
        checks.check_pieces(tensors, 0)


@pytest.mark.parametrize("dim", [-3, 2, 5])
def test_dimensions_out_of_range_in_the_words_of_torch(dim):
    with pytest.raises(IndexError) as torchs:
        torch.empty(2, 3).narrow(dim, 0, 0)
    with pytest.raises(IndexError) as ours:
        checks.wrap_dim(dim, 2)
    assert str(ours.value) == str(torchs.value)


def test_dimensions_in_range():
    assert [checks.wrap_dim(d, 2) for d in (-2, -1, 0, 1)] == [0, 1, 0, 1]
    assert [checks.wrap_dim(d, 0) for d in (-1, 0)] == [0, 0]


def test_chunks():
    source = torch.empty(2, 5)
    assert checks.check_chunks([torch.empty(2, 1), torch.empty(2, 4)], source, -1) == 1
    with pytest.raises(RuntimeError, match="Expected 5, but got total size 4"):
        checks.check_chunks([torch.empty(2, 4)], source, 1)


def test_outputs():
    good = torch.empty(3)
    checks.check_outputs("op", [good, good.clone()], [CPU, CPU], torch.float32)
    for bad, text in (
        (torch.empty(6)[::2], r"index 1 has shape \[3\] and strides \[2\]"),
        (torch.eye(3).to_sparse(), "index 1 has shape .* and layout torch.sparse_coo"),
        (torch.empty(3).double(), "index 1 has dtype torch.float64"),
    ):
        with pytest.raises(ValueError, match=text):
            checks.check_outputs("op", [good, bad], [CPU, CPU], torch.float32)
