"""What gather says when replicas return different things: which replica, and where."""

import collections
import dataclasses
import re

import pytest
import torch

from pyparallel.devices import resolve_devices, virtual_devices
from pyparallel.scatter_gather import gather


def join(outputs, dim=0):
    ranks = resolve_devices(virtual_devices(len(outputs)))
    return gather(outputs, ranks, ranks[0], dim)


@dataclasses.dataclass
class One:
    x: object


@dataclasses.dataclass
class Other:
    y: object


A, B = {"a": 1}, {"b": 1}


@pytest.mark.behaviour(122, 123, 132)
@pytest.mark.parametrize(
    "outputs, error, text",
    [
        (
            [{"a": 1}, {}],
            ValueError,
            r"^All dicts must have the same number of keys. gather: replica 1 lacks the keys "
            r"\['a'\] of replica 0, and adds \[\] \(at output\)",
        ),
        ([A, A, B], KeyError, r"replica 2 lacks the keys \['a'\].*adds \['b'\] \(at output\)"),
        ([[A], [B]], KeyError, r"replica 1 .*\(at output\[0\]\)"),
        (
            [(1, 1), (1, 1), (1,)],
            ValueError,
            "replica 0 returned a tuple of length 2, but replica 2 returned one of length 1",
        ),
        ([[], [1]], ValueError, r"a list of length 0.*replica 1.*length 1 \(at output\)"),
        ([{"k": (1, [2])}, {"k": (1, [2, 3])}], ValueError, r"length 2 \(at output\['k'\]\[1\]\)"),
        ([collections.deque([1]), collections.deque()], ValueError, "deque of length 1"),
        ([One(1), Other(1)], TypeError, "returned One, but replica 1 returned Other"),
        (
            [One([1]), One([None])],
            TypeError,
            r"replica 1 returned None \(at output.x\[0\]",
        ),
        (
            [{"k": [torch.ones(1, 2)]}, {"k": [torch.ones(1, 3)]}],
            RuntimeError,
            r"^Input tensor at index 1 has invalid shape.*\(at output\['k'\]\[0\]\)",
        ),
    ],
)
def test_errors_name_replica_and_place(outputs, error, text):
    with pytest.raises(error) as caught:
        join(outputs)
    assert re.search(text, caught.value.args[0]), caught.value


def test_a_missing_dimension_names_the_place():
    with pytest.raises(IndexError, match=r"Dimension out of range.*\(at output\[0\]\)"):
        join([[torch.ones(1)], [torch.ones(1)]], dim=1)
