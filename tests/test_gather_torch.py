"""Joining outputs beside torch's own code, on the CPU, where only its transfer is replaced."""

import collections
import dataclasses
import sys
import types
import typing

import pytest
import torch

from pyparallel.devices import resolve_devices, virtual_devices
from pyparallel.scatter_gather import gather


class Pair(typing.NamedTuple):
    x: object
    y: object


class Output(collections.OrderedDict):
    pass


@dataclasses.dataclass
class Data:
    x: object


def ours(outputs, dim=0):
    ranks = resolve_devices(virtual_devices(len(outputs)))
    return gather(outputs, ranks, ranks[0], dim)


@pytest.fixture
def torchs(monkeypatch):
    """torch's gather; its transfer, which needs GPUs, concatenates."""
    module = sys.modules["torch.nn.parallel.scatter_gather"]

    def concatenate(target, dim, *tensors):
        return torch.cat(tensors, dim)

    monkeypatch.setattr(module, "Gather", types.SimpleNamespace(apply=concatenate))
    return lambda outputs, dim=0: module.gather(outputs, 0, dim)


def tensor(rank, size=2):
    return torch.full((size, 3), float(rank))


MAKE = {
    "tensor": tensor,
    "uneven": lambda rank: tensor(rank, size=3 - rank),
    "no rows": lambda rank: tensor(rank, size=0),
    "tuple": lambda rank: (tensor(rank), tensor(-rank)),
    "list": lambda rank: [tensor(rank)],
    "empty tuple": lambda rank: (),
    "empty list": lambda rank: [],
    "empty dict": lambda rank: {},
    "dict": lambda rank: {"b": tensor(rank), "a": tensor(-rank)},
    "subclass of dict": lambda rank: Output(loss=tensor(rank)),
    "named tuple": lambda rank: Pair(tensor(rank), None),
    "deque": lambda rank: collections.deque([tensor(rank)]),
    "return type": lambda rank: tensor(rank).max(1),
    "None": lambda rank: None,
    "deep": lambda rank: [({"k": [Pair([tensor(rank)], {})]}, None)],
    "integers": lambda rank: torch.tensor([rank]),
    "booleans": lambda rank: torch.tensor([rank > 0]),
    "complex": lambda rank: torch.tensor([rank * 1j]),
}


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif ours is not None:
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)


@pytest.mark.behaviour(121, 137, 139)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", MAKE)
def test_what_torch_can_join_becomes_the_same(torchs, ranks, kind):
    outputs = [MAKE[kind](rank) for rank in range(ranks)]
    assert_same(ours(outputs), torchs(outputs))


@pytest.mark.behaviour(121)
def test_another_dimension(torchs):
    outputs = [(tensor(0), tensor(1)), (tensor(2), tensor(3))]
    for dim in (1, -1, -2):
        assert_same(ours(outputs, dim), torchs(outputs, dim))


@pytest.mark.behaviour(122, 123)
@pytest.mark.parametrize(
    "outputs, error",
    [
        ([{"a": tensor(0)}, {}], ValueError),
        ([{}, {"a": tensor(0)}], ValueError),
        ([{"a": tensor(0)}, {"b": tensor(0)}], KeyError),
        ([(tensor(0),), ()], ValueError),
        ([[tensor(0)], [tensor(0)] * 2], ValueError),
    ],
)
def test_errors_are_of_torchs_class_and_begin_with_its_words(torchs, outputs, error):
    with pytest.raises(error) as caught:
        ours(outputs)
    try:
        torchs(outputs)
        # Older versions of torch drop what is surplus in a list.
        assert isinstance(outputs[0], (list, tuple))
    except error as theirs:
        if isinstance(outputs[0], dict) and error is ValueError:
            assert str(caught.value).startswith(str(theirs))
    assert "replica 1" in str(caught.value)


@pytest.mark.behaviour(124, 125, 126)
@pytest.mark.parametrize(
    "outputs, expected",
    [
        ([1, 2], torch.tensor([1, 2])),
        ([0.5, 1.5], torch.tensor([0.5, 1.5])),
        ([True, False], torch.tensor([True, False])),
        (["ab", "c"], ["ab", "c"]),
        ([b"a", b"b"], [b"a", b"b"]),
        ([{1}, {2}], [{1}, {2}]),
        ([torch.Size([1]), torch.Size([2])], [torch.Size([1]), torch.Size([2])]),
    ],
)
def test_what_torch_cannot_join(torchs, outputs, expected):
    joined = ours(outputs)
    assert type(joined) is type(expected)
    assert torch.equal(joined, expected) if isinstance(joined, torch.Tensor) else joined == expected
    try:
        theirs = torchs(outputs)
    except (TypeError, AttributeError):
        return
    # Silently something else: "<map object at 0x...>", or a set or a shape with it inside.
    assert type(theirs) is type(outputs[0]) and theirs not in outputs


@pytest.mark.behaviour(126)
def test_containers_that_torch_cannot_build(torchs):
    def default(rank):
        output = collections.defaultdict(list)
        output["k"] = tensor(rank)
        return output

    joined = ours([default(0), default(1)])
    assert type(joined) is collections.defaultdict and joined.default_factory is list
    assert_same(joined["k"], torch.cat([tensor(0), tensor(1)]))
    joined = ours([Data(tensor(0)), Data(tensor(1))])
    assert type(joined) is Data
    assert_same(joined.x, torch.cat([tensor(0), tensor(1)]))
    for outputs in ([default(0), default(1)], [Data(tensor(0)), Data(tensor(1))]):
        with pytest.raises(TypeError):
            torchs(outputs)


@pytest.mark.behaviour(127)
def test_none_from_some_replicas(torchs):
    for outputs in ([tensor(0), None], [None, tensor(0)]):
        with pytest.raises(TypeError, match="replica 0 returned .*, but replica 1 returned"):
            ours(outputs)
    assert torchs([None, tensor(0)]) is None  # the tensor is lost


@pytest.mark.behaviour(129, 132)
@pytest.mark.parametrize(
    "shapes, dim, text",
    [
        ([(2, 3), (2, 4)], 0, "Input tensor at index 1 has invalid shape [2, 4], but expected "),
        (
            [(2, 3), (1, 3), (2, 2)],
            0,
            "Input tensor at index 2 has invalid shape [2, 2], but expected [2, 3]",
        ),
        (
            [(2, 3), (3, 3)],
            1,
            "Input tensor at index 1 has invalid shape [3, 3], but expected [2, 3]",
        ),
        (
            [(2, 3), (2,)],
            0,
            "Expected all input tensors to have the same number of dimensions, but tensor at index "
            "1 has 1 dimensions, (expected 2)",
        ),
        (
            [(1,), ()],
            0,
            "Expected all input tensors to have the same number of dimensions, but tensor at index "
            "1 has 0 dimensions, (expected 1)",
        ),
        (
            [(), (1,)],
            0,
            "Expected all input tensors to have the same number of dimensions, but tensor at index "
            "1 has 1 dimensions, (expected 0)",
        ),
    ],
)
def test_shapes_that_differ(shapes, dim, text):
    outputs = [torch.ones(shape) for shape in shapes]
    ranks = resolve_devices(virtual_devices(4))
    for target in (0, 3):  # the device of an output, and another
        with pytest.raises(RuntimeError) as caught:
            gather(outputs, ranks, ranks[target], dim)
        assert str(caught.value).startswith(text)


@pytest.mark.behaviour(136)
@pytest.mark.parametrize("dim", [0, 1])
def test_each_replica_gets_its_part_of_the_gradient(dim):
    leaves = [torch.zeros(2, 2).requires_grad_(), torch.zeros(2, 2).requires_grad_()]
    scale = torch.arange(8.0).view((4, 2) if dim == 0 else (2, 4))
    (ours(leaves, dim) * scale).sum().backward()
    for leaf, part in zip(leaves, scale.chunk(2, dim), strict=True):
        assert torch.equal(leaf.grad, part)
