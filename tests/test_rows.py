"""The matrix of bytes whose columns scatter and gather move."""

import pytest
import torch

from pyparallel.layout import memory_order
from pyparallel.rows import Rows, gather_on_host


def test_along_each_dimension():
    size, order = (2, 3, 4), [0, 1, 2]
    assert Rows.along(0, size, order, 4) == Rows(count=1, pitch=96, unit=48)
    assert Rows.along(1, size, order, 4) == Rows(count=2, pitch=48, unit=16)
    assert Rows.along(2, size, order, 4) == Rows(count=6, pitch=16, unit=4)


def test_shares():
    assert Rows(1, 80, 8).shares([3, 0, 7]) == ([0, 24, 24], [24, 0, 56])
    assert Rows(1, 0, 8).shares([]) == ([], [])


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("permutation", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
def test_a_share_holds_the_elements_of_its_piece(dim, permutation):
    source = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5).permute(permutation)
    memory = source.as_strided((source.numel(),), (1,)).tolist()
    rows = Rows.along(dim, source.size(), memory_order(source), 1)
    lengths = [1, source.size(dim) - 1]
    for piece, offset, nbytes in zip(
        source.split_with_sizes(lengths, dim), *rows.shares(lengths), strict=True
    ):
        found = []
        for row in range(rows.count):
            start = row * rows.pitch + offset
            found += memory[start : start + nbytes]
        assert sorted(found) == sorted(piece.flatten().tolist())


def test_64_bit_arithmetic():
    rows = Rows.along(1, (1 << 20, 1 << 20), [0, 1], 8)
    assert rows.pitch * rows.count == 8 << 40


def test_gather_on_host():
    result = torch.full((2, 5), -1.0)
    gather_on_host([torch.zeros(2, 2), torch.ones(2, 0), torch.ones(2, 3)], result, 1)
    assert result.tolist() == [[0, 0, 1, 1, 1]] * 2
