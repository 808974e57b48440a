"""Inputs whose rows are all equal give one row to each used rank; others are never dropped."""

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import virtual_devices
from pyparallel.devices import resolve_devices
from pyparallel.equal_rows import has_equal_rows, one_row_each
from pyparallel.scatter_gather import scatter_kwargs

NAN = float("nan")


def scatter(*inputs, n=4, dim=0, **kwargs):
    return scatter_kwargs(inputs, kwargs, resolve_devices(virtual_devices(n)), dim)


def batch(rows, *sizes):
    return torch.arange(float(torch.Size([rows, *sizes]).numel())).view(rows, *sizes)


@pytest.mark.behaviour(41, 44)
@pytest.mark.parametrize("rows", range(1, 10))
def test_a_number_for_each_device_beside_any_batch(rows):
    """As num_items_in_batch of the Trainer, which is given by keyword, after the batch."""
    x, number = batch(rows, 3), torch.full((4, 1), 7.0)
    _, kwargs = scatter(input_ids=x, num_items_in_batch=number)
    assert len(kwargs) == len(x.chunk(4))
    for part, expected in zip(kwargs, x.chunk(4), strict=True):
        assert torch.equal(part["input_ids"], expected)
        assert part["num_items_in_batch"].tolist() == [[7.0]]


@pytest.mark.behaviour(44)
@pytest.mark.parametrize("rows", range(1, 10))
def test_one_row_for_all(rows):
    """As a mask or positions that broadcast over the batch."""
    x, mask = batch(rows, 2), batch(1, 2, 2)
    for args, _ in (scatter(x, mask), scatter(x, [{"mask": mask}])):
        assert len(args) == len(x.chunk(4))
        for part, expected in zip(args, x.chunk(4), strict=True):
            found = part[1] if isinstance(part[1], torch.Tensor) else part[1][0]["mask"]
            assert torch.equal(part[0], expected) and torch.equal(found, mask)


@pytest.mark.behaviour(41)
def test_rows_that_differ_are_never_dropped():
    x, y = batch(4, 1), batch(9, 1)
    constant, blank = torch.ones(3, 1), torch.zeros(9, 1)
    for inputs in ((x, y), (y, x), (constant, x, y), (blank, x), (x, blank)):
        with pytest.raises(ValueError, match=r"or at most 4 equal rows, of which each device gets"):
            scatter(*inputs)
    for inputs in ((x, constant), (constant, x)):
        args, _ = scatter(*inputs)
        assert len(args) == 4


def test_the_first_tensor_decides_between_constants():
    for rows, chunks in ((4, 4), (3, 3), (1, 1), (6, 3)):
        args, _ = scatter(torch.zeros(rows, 2), torch.ones(4, 1))
        assert len(args) == chunks
        assert sum(x.size(0) for x, _ in args) == rows
    args, _ = scatter(torch.zeros(8, 2), torch.ones(1, 1))
    assert [x.size(0) for x, _ in args] == [2, 2, 2, 2]


@pytest.mark.parametrize("dim", [1, -1])
def test_any_dimension(dim):
    x, constant = batch(2, 3), torch.tensor([[5.0], [6.0]]).expand(2, 4)
    args, _ = scatter(x, constant, dim=dim)
    assert [part[1].tolist() for part in args] == [[[5.0], [6.0]]] * 3


@pytest.mark.parametrize("split, used", [("chunk", 3), ("balanced", 4)])
def test_both_rules_of_splitting(split, used):
    devices = resolve_devices(virtual_devices(4))
    args, _ = scatter_kwargs((batch(5), torch.ones(3)), None, devices, 0, split)
    assert len(args) == used
    assert all(number.tolist() == [1.0] for _, number in args) or used == 3


def test_no_rows():
    args, _ = scatter(batch(3, 2), torch.empty(0, 2))
    assert [[len(x), len(none)] for x, none in args] == [[1, 0]] * 3


def test_gradients_are_added():
    x, scale = batch(3, 1), torch.full((4, 1), 2.0, requires_grad=True)
    row = torch.full((1, 1), 3.0, requires_grad=True)
    args, _ = scatter(x, scale, row)
    sum((rank + 1) * (s * r).sum() for rank, (_, s, r) in enumerate(args)).backward()
    assert scale.grad.tolist() == [[3.0], [6.0], [9.0], [0.0]]
    assert row.grad.item() == 2.0 * (1 + 2 + 3)


def test_through_the_wrapper():
    class Scaled(nn.Module):
        def forward(self, x, *, number):
            assert number.shape == (1, 1)
            return x / number

    dp = pyparallel.DataParallel(Scaled(), virtual_devices(4))
    for rows in range(1, 10):
        x = batch(rows, 2)
        assert torch.equal(dp(x, number=torch.full((4, 1), 2.0)), x / 2)


@pytest.mark.parametrize(
    "tensor, equal",
    [
        (torch.ones(3), True),
        (torch.tensor([1.0, 1.0, 2.0]), False),
        (torch.tensor([NAN, NAN]), True),
        (torch.tensor([0.0, -0.0]), False),
        (torch.ones(3, 2, 2).transpose(0, 2), True),
        (batch(2, 3), False),
        (batch(1, 3), True),
        (torch.empty(4, 0), True),
        (torch.empty(0, 4), True),
        (torch.ones(3, 2, dtype=torch.complex64).conj(), True),
        (torch.tensor([1j, 2j]).conj().imag, False),
        (torch.tensor([True, True]), True),
        (torch.ones(4, 3).to(torch.float8_e4m3fn), True),
        (torch.tensor([1, 2, 1]).to(torch.float8_e5m2), False),
        (torch.ones(2, 2, requires_grad=True), True),
        (batch(1, 3).expand(5, 3), True),
    ],
)
def test_equal_rows(tensor, equal):
    assert has_equal_rows(tensor, 0) is equal


def test_rows_of_the_other_dimension():
    tensor = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    assert (
        has_equal_rows(tensor, 1) and has_equal_rows(tensor, -1) and not has_equal_rows(tensor, 0)
    )
    rows, sizes = one_row_each(tensor, 3, -1)
    assert sizes == [1, 1, 1] and rows.tolist() == [[1.0] * 3, [2.0] * 3]
