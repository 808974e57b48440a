"""Splitting and joining through containers, chunk sizes, and inputs that must not lose data."""

import collections
import dataclasses
import enum
import typing
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from pyparallel.devices import Device, resolve_devices, virtual_devices
from pyparallel.scatter_gather import gather, scatter_kwargs


class Pair(typing.NamedTuple):
    x: object
    y: object


class Tagged(collections.OrderedDict):
    """A dict whose constructor takes no items, as many frameworks have."""

    def __init__(self, tag="tag"):
        super().__init__()
        self.tag = tag


class Fields(collections.UserDict):
    pass


class Kind(enum.IntEnum):
    ONE = 1


def devices(n):
    return resolve_devices(virtual_devices(n))


def scatter(obj, n, dim=0):
    """One argument through scatter_kwargs; its part for each rank."""
    args, kwargs = scatter_kwargs((obj,), None, devices(n), dim)
    assert kwargs == ({},) * len(args)
    return [arg for (arg,) in args]


def join(outputs, n=None, target=0, dim=0):
    ranks = devices(n or len(outputs))
    return gather(outputs, ranks, Device("cpu", target), dim)


def sizes(parts):
    return [len(part) for part in parts]


@pytest.mark.behaviour(28)
@pytest.mark.parametrize(
    "batch, expected",
    [
        (0, [0, 0, 0, 0]),
        (1, [1]),
        (2, [1, 1]),
        (4, [1, 1, 1, 1]),
        (5, [2, 2, 1]),
        (6, [2, 2, 2]),
        (9, [3, 3, 3]),
        (10, [3, 3, 3, 1]),
        (13, [4, 4, 4, 1]),
    ],
)
def test_chunks_are_those_of_torch(batch, expected):
    x = torch.arange(batch * 3.0).view(batch, 3)
    parts = scatter(x, 4)
    assert sizes(parts) == expected
    assert torch.equal(torch.cat(parts), x)


@pytest.mark.behaviour(28)
@given(st.integers(0, 200), st.integers(1, 16))
def test_any_batch_is_chunked_as_torch_does(batch, n):
    x = torch.arange(batch)
    parts = scatter(x, n)
    for part, expected in zip(parts, x.chunk(n), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.behaviour(31, 51)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool, torch.uint8])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_any_dimension(dim, dtype):
    x = (100 * torch.rand(4, 5, 6)).to(dtype)
    if dtype.is_complex:
        x = x * (1 + 2j)
    parts = scatter(x, 3, dim)
    for part, expected in zip(parts, x.chunk(3, dim), strict=True):
        assert torch.equal(part, expected)
    assert torch.equal(join(parts, dim=dim), x)


@pytest.mark.behaviour(46)
def test_the_first_chunk_is_a_view_and_the_others_are_not():
    x = torch.zeros(4, 2)
    parts = scatter(x, 2)
    parts[0].add_(1)
    parts[1].add_(2)
    assert torch.equal(x, torch.tensor([[1.0, 1], [1, 1], [0, 0], [0, 0]]))


def test_a_replica_may_write_gradients_into_its_input():
    weight = torch.ones(2, requires_grad=True)
    for part in scatter(torch.zeros(4, 2), 2):
        part += weight
        part.sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 4.0))


@pytest.mark.behaviour(47, 134)
def test_memory_format_is_kept():
    x = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    parts = scatter(x, 2)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    assert join(parts).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.behaviour(33, 34)
def test_containers_are_rebuilt_around_the_chunks():
    x = torch.arange(4.0)
    obj = {"pair": Pair(x, 1), "list": [x, "text"], "tuple": (x, None), "dict": {"deep": [(x,)]}}
    first, second = scatter(obj, 2)
    assert type(first["pair"]) is Pair and first["pair"].y == 1
    assert type(first["list"]) is list and first["list"][1] == "text"
    assert type(first["tuple"]) is tuple and first["tuple"][1] is None
    for part, expected in ((first, x[:2]), (second, x[2:])):
        for tensor in (
            part["pair"].x,
            part["list"][0],
            part["tuple"][0],
            part["dict"]["deep"][0][0],
        ):
            assert torch.equal(tensor, expected)


def mapping_examples():
    tagged, fields = Tagged("mine"), Fields()
    default = collections.defaultdict(list)
    counter = collections.Counter()
    ordered = collections.OrderedDict()
    for mapping in (tagged, fields, default, counter, ordered):
        mapping["x"] = torch.arange(4)
    return [tagged, fields, default, counter, ordered]


@pytest.mark.behaviour(38)
@pytest.mark.parametrize("mapping", mapping_examples(), ids=lambda m: type(m).__name__)
def test_mappings_of_every_kind_survive_both_ways(mapping):
    parts = scatter(mapping, 2)
    assert [type(part) for part in parts] == [type(mapping)] * 2
    assert parts[1]["x"].tolist() == [2, 3]
    assert parts[0] is not mapping and mapping["x"].tolist() == [0, 1, 2, 3]
    joined = join(parts)
    assert type(joined) is type(mapping) and joined["x"].tolist() == [0, 1, 2, 3]
    for part in (*parts, joined):
        assert getattr(part, "tag", "mine") == "mine"
        assert getattr(part, "default_factory", list) is list


@pytest.mark.behaviour(35, 36)
def test_other_objects_are_shared():
    shared = [object(), {1}, collections.deque([1]), torch.Size([2, 3]), range(3), (), [], {}]
    args, _ = scatter_kwargs((torch.zeros(3, 1), *shared), None, devices(3))
    for _, *rest in args:
        assert all(a is b for a, b in zip(rest, shared, strict=True))


@pytest.mark.behaviour(37)
def test_lists_of_other_objects_are_new_lists():
    names = ["a", "b"]
    parts = scatter(names, 3)
    assert parts == [names] * 3
    assert len({id(part) for part in [*parts, names]}) == 4


@pytest.mark.report("trl#2338", "transformers#36967", "transformers#36492")
@pytest.mark.behaviour(30)
def test_tensors_without_dimensions_go_to_every_rank():
    weight = torch.tensor(2.0, requires_grad=True)
    plain = torch.tensor(3)
    args, _ = scatter_kwargs((torch.ones(5, 1), weight, plain), None, devices(4))
    assert len(args) == 3
    assert len({w.data_ptr() for _, w, _ in args}) == 3 == len({p.data_ptr() for _, _, p in args})
    sum(w * (rank + 1) for rank, (_, w, _) in enumerate(args)).backward()
    assert weight.grad == 6


@pytest.mark.behaviour(43, 45)
def test_positional_and_keyword_arguments_have_the_same_number_of_ranks():
    """Constants go to the ranks in use only, wherever the tensors are."""
    x = torch.ones(9, 1)
    args, kwargs = scatter_kwargs((x,), {"flag": True}, devices(4))
    assert len(args) == len(kwargs) == 3 and kwargs[0] == {"flag": True}
    args, kwargs = scatter_kwargs((1, 2, 3), {"x": x}, devices(4))
    assert args == ((1, 2, 3),) * 3 and sizes([k["x"] for k in kwargs]) == [3, 3, 3]
    args, kwargs = scatter_kwargs((), {"x": x}, devices(4))
    assert args == ((),) * 3
    args, kwargs = scatter_kwargs((), {"flag": 1}, devices(2))
    assert args == ((), ()) and kwargs == ({"flag": 1},) * 2
    assert scatter_kwargs((), {}, devices(2)) == ((), ())
    assert scatter_kwargs((), None, devices(2)) == ((), ())


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("split", ["positional", "keyword", "nested"])
def test_different_numbers_of_chunks_are_refused(split):
    x, y = torch.arange(4.0).view(4, 1), torch.arange(9.0).view(9, 1)
    args, kwargs = {
        "positional": ((x, y), {}),
        "keyword": ((x,), {"y": y}),
        "nested": (([x, {"y": y}],), {}),
    }[split]
    with pytest.raises(ValueError, match=r"sizes \[4, 9\] along dimension 0.*\[4, 3\]"):
        scatter_kwargs(args, kwargs, devices(4))


def test_a_missing_dimension_is_refused():
    with pytest.raises(IndexError):
        scatter(torch.ones(3), 2, dim=1)


@pytest.mark.behaviour(39, 50)
def test_what_cannot_be_split_is_refused():
    with pytest.raises(TypeError, match="pack them inside forward"):
        scatter(pack_sequence([torch.ones(2)]), 2)
    with pytest.raises(TypeError, match=r"sparse_coo and shape \[2, 2\] cannot be split"):
        scatter(torch.eye(2).to_sparse(), 2)
    with pytest.raises(TypeError, match="return padded tensors"):
        join([pack_sequence([torch.ones(2)])] * 2)


@pytest.mark.behaviour(121, 139)
def test_nested_outputs_are_joined_in_the_order_of_ranks():
    outputs = [
        {"a": (torch.full((2,), rank), [None, {"b": torch.full((1, 2), rank)}])}
        for rank in range(3)
    ]
    joined = join(outputs)
    assert joined["a"][0].tolist() == [0, 0, 1, 1, 2, 2]
    assert joined["a"][1][0] is None
    assert joined["a"][1][1]["b"].tolist() == [[0, 0], [1, 1], [2, 2]]
    pair = join([Pair(torch.tensor([rank]), "s") for rank in range(2)])
    assert type(pair) is Pair and pair.x.tolist() == [0, 1] and pair.y == ["s", "s"]
    queue = join([collections.deque([torch.tensor([rank])]) for rank in range(2)])
    assert type(queue) is collections.deque and queue[0].tolist() == [0, 1]
    values = join([torch.ones(2, 3).max(1) for _ in range(2)])
    assert type(values) is torch.return_types.max and len(values.indices) == 4


@pytest.mark.behaviour(126)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_dataclasses_are_joined_field_by_field(frozen, slots):
    @dataclasses.dataclass(frozen=frozen, slots=slots)
    class Output:
        logits: torch.Tensor
        loss: float
        hidden: object = None
        name: str = dataclasses.field(init=False, default="n")

    joined = join([Output(torch.full((1,), float(rank)), rank + 0.5) for rank in range(2)])
    assert type(joined) is Output
    assert joined.logits.tolist() == [0, 1] and joined.loss.tolist() == [0.5, 1.5]
    assert joined.hidden is None and joined.name == ["n", "n"]


@pytest.mark.behaviour(124)
@pytest.mark.parametrize(
    "values, dtype",
    [
        ([1, 2], torch.int64),
        ([0.5, 1.5], torch.float32),
        ([True, False], torch.bool),
        ([1, 2.5], torch.float32),
        ([1j, 2j], torch.complex64),
    ],
)
def test_numbers_become_a_vector(values, dtype):
    joined = join(values)
    assert joined.dtype == dtype and joined.tolist() == values


@pytest.mark.behaviour(125, 126)
@pytest.mark.parametrize("values", [["a", "b"], [b"a", b"b"], [{1}, {2}], [Kind.ONE, Kind.ONE]])
def test_other_objects_become_a_list(values):
    assert join(values) == values


def test_shapes_become_a_list():
    assert join([torch.Size([1]), torch.Size([2])]) == [torch.Size([1]), torch.Size([2])]


@pytest.mark.behaviour(128, 185)
@pytest.mark.parametrize("dim", [0, 1])
def test_scalars_become_a_vector_with_torchs_warning(dim):
    leaves = [torch.tensor(float(rank), requires_grad=True) for rank in range(3)]
    with pytest.warns(UserWarning, match="but all input tensors were scalars"):
        joined = join(leaves, dim=dim)
    assert joined.tolist() == [0, 1, 2]
    (joined * torch.tensor([1.0, 2, 3])).sum().backward()
    assert [leaf.grad.item() for leaf in leaves] == [1, 2, 3]


@pytest.mark.behaviour(185)
def test_numbers_and_tensors_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        join([1, 2])
        join([torch.ones(1), torch.ones(1)])


@pytest.mark.behaviour(135)
def test_joined_tensors_are_new():
    x = torch.ones(2)
    joined = join([x])
    joined.zero_()
    assert x.tolist() == [1, 1]


@pytest.mark.behaviour(133)
def test_dtypes_promote():
    joined = join([torch.tensor([1]), torch.tensor([1.5])])
    assert joined.dtype == torch.float32 and joined.tolist() == [1, 1.5]


@pytest.mark.behaviour(127)
def test_different_structures_are_refused():
    one = torch.ones(1)
    with pytest.raises(TypeError, match="replica 0 returned Tensor, but replica 1 returned None"):
        join([one, None])
    with pytest.raises(TypeError, match="replica 0 returned None, but replica 2 returned Tensor"):
        join([None, None, one])
    with pytest.raises(TypeError, match="replica 0 returned tuple, but replica 1 returned Tensor"):
        join([(one,), one])


@pytest.mark.behaviour(131)
def test_fewer_outputs_than_ranks_and_other_targets():
    outputs = [torch.full((1,), rank) for rank in range(2)]
    for target in (0, 1, 3, 9):
        assert join(outputs, n=4, target=target).tolist() == [0, 1]
    assert gather(outputs, devices(4), None).tolist() == [0, 1]


def test_sparse_outputs_are_joined():
    joined = join([torch.eye(2).to_sparse()] * 2)
    assert torch.equal(joined.to_dense(), torch.eye(2).repeat(2, 1))


@pytest.mark.behaviour(136)
def test_gradients_go_through_both_ways():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    joined = join(scatter(x, 4))
    scale = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    (joined * scale).sum().backward()
    assert torch.equal(x.grad, scale)


@pytest.mark.behaviour(55)
def test_an_input_that_requires_a_gradient_is_not_written_in_place():
    part = scatter(torch.ones(4, requires_grad=True) * 1, 2)[0]
    with pytest.raises(RuntimeError, match="modified inplace"):
        part.add_(1)
