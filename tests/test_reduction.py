"""Dtypes of sums, and the sums that torch makes."""

import pytest
import torch

from pyparallel.reduction import add_with_torch, core_count, core_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype, name, elements",
    [
        (torch.float16, "float16", 6),
        (torch.bfloat16, "bfloat16", 6),
        (torch.float32, "float32", 6),
        (torch.float64, "float64", 6),
        (torch.int32, "int32", 6),
        (torch.int64, "int64", 6),
        (torch.uint32, "int32", 6),
        (torch.uint64, "int64", 6),
        (torch.complex64, "float32", 12),
        (torch.complex128, "float64", 12),
    ],
)
def test_core_dtypes(dtype, name, elements):
    assert core_dtype(dtype) == name
    assert core_count(torch.zeros(2, 3, dtype=dtype)) == elements


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn]
)
def test_dtypes_that_the_core_does_not_add(dtype):
    assert core_dtype(dtype) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_integers_wrap_around(dtype):
    top = torch.iinfo(dtype).max
    total = add_with_torch(
        [torch.tensor([top, 1], dtype=dtype), torch.tensor([1, 2], dtype=dtype)], CPU
    )
    assert total.tolist() == [torch.iinfo(dtype).min, 3]


def test_uint16():
    terms = [torch.tensor([65535, 40000, 1]).to(torch.uint16) for _ in range(2)]
    total = add_with_torch(terms, CPU)
    assert total.dtype == torch.uint16
    assert total.to(torch.int32).tolist() == [65534, 80000 - 65536, 2]


def test_bool_is_or():
    a, b = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    assert add_with_torch([a, b], CPU).tolist() == [True, True, False]


def test_float8_is_rounded_once():
    # 1 + 1/16 rounds to 1 in e4m3 (three mantissa bits), so adding one by one would stay at 1.
    one, small = torch.tensor([1.0]), torch.tensor([0.0625])
    terms = [t.to(torch.float8_e4m3fn) for t in (one, small, small)]
    total = add_with_torch(terms, CPU)
    assert total.dtype == torch.float8_e4m3fn and total.float().item() == 1.125


def test_order_is_that_of_the_terms():
    big, one = torch.tensor([1e8]), torch.tensor([1.0])
    assert add_with_torch([big, one, -big], CPU).item() == 0.0
    assert add_with_torch([big, -big, one], CPU).item() == 1.0


def test_result_is_new_memory():
    x = torch.tensor([1, 2], dtype=torch.int8)
    total = add_with_torch([x], CPU)
    assert total.data_ptr() != x.data_ptr() and torch.equal(total, x)
    add_with_torch([x, x], CPU)
    assert x.tolist() == [1, 2]


def test_sparse_terms_stay_sparse_and_mixed_ones_become_dense():
    dense = torch.tensor([0.0, 3.0, 0.0, 1.0], requires_grad=True)
    sparse = torch.tensor([0.0, 1.0, 2.0, 0.0]).to_sparse()
    total = add_with_torch([sparse, sparse], CPU)
    assert total.layout == torch.sparse_coo and total.to_dense().tolist() == [0, 2, 4, 0]
    for terms in ([sparse, dense], [dense, sparse]):
        total = add_with_torch(terms, CPU)
        assert total.layout == torch.strided and total.tolist() == [0, 4, 2, 1]
        assert not total.requires_grad
