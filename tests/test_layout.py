"""Memory layouts: which tensors are dense, and strides of copies and pieces."""

import itertools

import pytest
import torch

from pyparallel.layout import (
    common_order,
    contiguous_strides,
    dense,
    is_dense,
    memory_order,
    ordered_strides,
    with_strides,
)

DENSE = [
    torch.empty(()),
    torch.empty(0),
    torch.empty(3, 0, 2),
    torch.empty(3, 4),
    torch.empty(3, 4).t(),
    torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    torch.empty(2, 3, 4).permute(2, 0, 1),
    torch.empty(1, 3, 1).transpose(0, 1),
    torch.empty(10)[3:7],
]
NOT_DENSE = [
    torch.empty(10)[::2],
    torch.empty(3, 4)[:, :2],
    torch.empty(3, 1).expand(3, 4),
    torch.empty(4).as_strided((2, 2), (1, 1)),
    torch.empty(3, 4).t()[:2],
]


@pytest.mark.parametrize("tensor", DENSE, ids=str)
def test_dense_tensors(tensor):
    assert is_dense(tensor)
    assert dense(tensor) is tensor
    # empty_like keeps the strides of dense tensors only: the same definition, by torch.
    assert torch.empty_like(tensor).stride() == tensor.stride()


@pytest.mark.parametrize("tensor", NOT_DENSE, ids=str)
def test_other_tensors_are_copied(tensor):
    tensor.fill_(3)
    assert not is_dense(tensor)
    copy = dense(tensor)
    assert copy.is_contiguous() and copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy, tensor)


@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_lazy_tensors_are_resolved(lazy):
    z = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (dense(lazy(z)), with_strides(lazy(z), (1,))):
        assert not tensor.is_conj() and not tensor.is_neg()
        assert torch.equal(tensor, lazy(z))


def test_copies_do_not_record_autograd():
    leaf = torch.ones(4, 4, requires_grad=True)
    assert not dense(leaf[:, ::2]).requires_grad
    assert not with_strides(leaf, (1, 4)).requires_grad


def test_with_strides():
    x = torch.arange(12.0).reshape(3, 4)
    assert with_strides(x, (4, 1)) is x
    turned = with_strides(x, (1, 3))
    assert turned.stride() == (1, 3) and torch.equal(turned, x)
    column = torch.arange(3.0).reshape(3, 1).t()  # size (1, 3), strides (1, 1)
    assert with_strides(column, (3, 1)) is column


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_memory_order_and_ordered_strides_are_inverse(order):
    size = (2, 3, 4)
    strides = ordered_strides(size, order)
    tensor = torch.empty_strided(size, strides)
    assert is_dense(tensor)
    assert memory_order(tensor) == list(order)


@pytest.mark.parametrize("size", [(8, 1, 28, 28), (8, 3, 1, 1), (1, 3, 4, 4), (1, 1, 1, 1)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dimensions_of_size_one_keep_their_strides(size, memory_format):
    tensor = torch.empty(size, memory_format=memory_format)
    assert ordered_strides(size, memory_order(tensor)) == tensor.stride()


@pytest.mark.parametrize("size", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_contiguous_strides(size):
    assert contiguous_strides(size) == torch.empty(size).stride()


def test_common_order():
    plain = torch.empty(2, 3, 4, 5)
    last = plain.to(memory_format=torch.channels_last)
    assert common_order([last, last]) == [0, 2, 3, 1]
    assert common_order([last, plain]) == common_order([plain]) == [0, 1, 2, 3]
    volume = torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    assert common_order([volume]) == [0, 2, 3, 4, 1]
    assert common_order([torch.empty(2, 3).t()]) == [0, 1]
