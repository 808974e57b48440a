"""Buckets: order, limits, kinds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyparallel import bucket
from pyparallel.bucket import assign_buckets

MIB = 1 << 20


def tensor_of(mib, dtype=torch.float32, requires_grad=True):
    """A tensor of a size without its memory."""
    count = int(mib * MIB) // dtype.itemsize
    return torch.empty(count, dtype=dtype, device="meta").requires_grad_(requires_grad)


@pytest.mark.behaviour(94)
def test_first_bucket_is_small_and_the_last_tensors_come_first():
    tensors = [tensor_of(10) for _ in range(8)] + [tensor_of(0.5), tensor_of(0.5)]
    # 1 MiB is full after two halves, 25 MiB after three tens.
    assert assign_buckets(tensors) == [[9, 8], [7, 6, 5], [4, 3, 2], [1, 0]]


def test_a_tensor_beyond_the_limit_closes_its_bucket():
    tensors = [tensor_of(1), tensor_of(100), tensor_of(1), tensor_of(3)]
    assert assign_buckets(tensors) == [[3], [2, 1], [0]]


def test_dtypes_and_frozen_tensors_have_buckets_of_their_own():
    tensors = [
        tensor_of(0.1),
        tensor_of(0.1, torch.float16),
        tensor_of(0.1, requires_grad=False),
        tensor_of(0.1),
        tensor_of(0.1, torch.int64, requires_grad=False),
        tensor_of(0.1, torch.complex64),
    ]
    # In the order in which they are complete: by their smallest index.
    assert assign_buckets(tensors) == [[5], [4], [2], [1], [3, 0]]


def test_each_kind_has_its_own_small_first_bucket():
    tensors = [tensor_of(1, torch.float16), tensor_of(1), tensor_of(1, torch.float16), tensor_of(1)]
    assert assign_buckets(tensors) == [[3], [2], [1], [0]]


def test_empty_inputs():
    assert assign_buckets([]) == []
    assert assign_buckets([torch.empty(0), torch.empty(0, 3)]) == [[1, 0]]


def test_lazy_parameters_are_refused_in_torchs_words():
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        assign_buckets(list(nn.LazyLinear(3).parameters()))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.sampled_from([torch.float32, torch.float16]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_every_bucket_keeps_the_rules(shapes):
    tensors = [tensor_of(size, dtype, grad) for size, dtype, grad in shapes]
    buckets = assign_buckets(tensors)
    assert sorted(k for members in buckets for k in members) == list(range(len(tensors)))
    seen = set()
    for members in sorted(buckets, key=lambda members: -members[0]):
        kinds = {(tensors[k].dtype, tensors[k].requires_grad) for k in members}
        assert len(kinds) == 1
        assert members == sorted(members, reverse=True)
        limit = bucket.BUCKET_BYTES if kinds <= seen else bucket.FIRST_BUCKET_BYTES
        seen |= kinds
        assert sum(tensors[k].nbytes for k in members[:-1]) < limit
    assert [members[-1] for members in buckets] == sorted(
        (members[-1] for members in buckets), reverse=True
    )
