"""Sequences of ints that the compiled core takes: lists, arrays, and what is neither."""

import array

import pytest
import torch

from pyparallel import _C

SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "array of Q": lambda values: array.array("Q", values),
    "array of q": lambda values: array.array("q", values),
    "read-only": lambda values: memoryview(array.array("Q", values)).toreadonly(),
    "every second": lambda values: memoryview(
        array.array("Q", [word for value in values for word in (value, 1 << 62)])
    )[::2],
}


@pytest.fixture
def core():
    communicator = _C.Communicator("host", [0, 0])
    yield communicator
    communicator.close()


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_any_sequence_of_ints_is_read(core, sequence):
    sources = [torch.arange(n, dtype=torch.uint8) + n for n in (5, 7, 1)]
    flat = torch.zeros(100, dtype=torch.uint8)
    core.broadcast(
        0,
        sequence([source.data_ptr() for source in sources]),
        sequence([3, 20, 99]),
        sequence([5, 7, 1]),
        sequence([0, flat.data_ptr()]),
        sequence([0, 0]),
    )
    expected = torch.zeros(100, dtype=torch.uint8)
    expected[3:8], expected[20:27], expected[99:] = sources
    assert torch.equal(flat, expected)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (array.array("q", [-1]), r"sizes holds -1, which is not in \[0, 2\*\*64\)"),
        (array.array("d", [8.0]), "sizes holds 8.0, which is not an int"),
        (array.array("Q", [8, 8]), "broadcast: got 1 offsets and 2 sizes"),
        (array.array("Q"), "broadcast: got 1 offsets and 0 sizes"),
    ],
    ids=["negative", "float", "too long", "empty"],
)
def test_arrays_are_checked_as_lists_are(core, sizes, message):
    memory = torch.zeros(8, dtype=torch.uint8).data_ptr()
    for values in (sizes, sizes.tolist()):
        with pytest.raises((ValueError, TypeError), match=message):
            core.broadcast(0, [memory], [0], values, [0, memory], [0, 0])
