"""Containers of every kind are rebuilt around other entries, or refused by name."""

import types
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree

from pyparallel import virtual_devices
from pyparallel.containers import entries_of, rebuild
from pyparallel.devices import resolve_devices
from pyparallel.scatter_gather import gather, scatter_kwargs

DEVICES = resolve_devices(virtual_devices(2))
Pair = namedtuple("Pair", ["first", "second"])


class Point(NamedTuple):
    x: object
    y: object = None


class FromTwo(tuple):
    """A tuple whose constructor wants something else than an iterable."""

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class NamedList(list):
    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


class Encoding(UserDict):
    """As BatchEncoding of Hugging Face: more arguments, and attributes that are entries."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Frozen(Mapping):
    """Cannot be written to; made from a dict."""

    def __init__(self, data):
        self._data = dict(data)

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class FrozenDict(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


class Keywords(MutableMapping):
    """Made from keywords, so that nobody can know how; a copy shares its dict."""

    def __init__(self, **data):
        self._data = data

    def __getitem__(self, key):
        return self._data[key]

    def __setitem__(self, key, value):
        self._data[key] = value

    def __delitem__(self, key):
        del self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class Registered(Keywords):
    pass


class Graph:
    def __init__(self, nodes, name):
        self.nodes, self.name = nodes, name


_pytree.register_pytree_node(
    Registered,
    lambda mapping: (list(mapping.values()), list(mapping)),
    lambda values, keys: Registered(**dict(zip(keys, values, strict=True))),
)
_pytree.register_pytree_node(
    Graph, lambda graph: ([graph.nodes], graph.name), lambda nodes, name: Graph(nodes[0], name)
)


def with_attribute(obj):
    obj.tag = "mine"
    return obj


def x():
    return torch.arange(4.0)


CONTAINERS = {
    "tuple": lambda: (x(), "text"),
    "list": lambda: [x(), "text"],
    "dict": lambda: {"x": x(), "text": "text"},
    "namedtuple": lambda: Pair(x(), None),
    "NamedTuple": lambda: Point(x()),
    "tuple of another constructor": lambda: with_attribute(FromTwo(x(), 1)),
    "return_types": lambda: torch.max(torch.eye(4), dim=1),
    "list with attributes": lambda: with_attribute(NamedList("name", [x()])),
    "immutable_list": lambda: immutable_list([x()]),
    "immutable_dict": lambda: immutable_dict({"x": x()}),
    "OrderedDict": lambda: OrderedDict(z=x(), a=1),
    "defaultdict": lambda: defaultdict(list, x=x()),
    "Counter": lambda: Counter(x=x()),
    "Encoding": lambda: with_attribute(Encoding({"x": x()}, "encodings")),
    "mappingproxy": lambda: types.MappingProxyType({"x": x()}),
    "Frozen": lambda: Frozen({"x": x(), "n": 1}),
    "FrozenDict": lambda: FrozenDict(x=x()),
    "ChainMap": lambda: ChainMap({"x": x()}, {"y": x()}),
    "registered mapping": lambda: Registered(x=x(), n=1),
    "registered class": lambda: Graph(x(), "name"),
}


@pytest.mark.report("transformers#5685", "transformers#36373")
@pytest.mark.behaviour(36, 38)
@pytest.mark.parametrize("name", CONTAINERS)
def test_both_ways(name):
    container = CONTAINERS[name]()
    before = entries_of(container)
    args, _ = scatter_kwargs((container,), None, DEVICES)
    parts = [arg[0] for arg in args]
    joined = gather(parts, DEVICES, DEVICES[0])
    for obj in (*parts, joined):
        assert type(obj) is type(container)
        for attribute in ("tag", "name", "encodings", "default_factory"):
            assert getattr(obj, attribute, 0) == getattr(container, attribute, 0)
        if isinstance(container, Mapping):
            assert list(obj) == list(container)
    for rank, part in enumerate(parts):
        for entry, original in zip(entries_of(part), before, strict=True):
            if isinstance(original, torch.Tensor):
                assert torch.equal(entry, original.chunk(2)[rank])
            else:
                assert entry == original
    for entry, original in zip(entries_of(joined), before, strict=True):
        if isinstance(original, torch.Tensor):
            assert torch.equal(entry, original)
    # And the caller's own is as it was.
    assert all(a is b for a, b in zip(before, entries_of(container), strict=True))


def test_a_mapping_that_cannot_be_rebuilt_is_named_and_left_alone():
    mapping = Keywords(x=x())
    with pytest.raises(TypeError, match="a Keywords with tensors can neither be copied"):
        scatter_kwargs((mapping,), None, DEVICES)
    with pytest.raises(TypeError, match="register_pytree_node"):
        gather([mapping, mapping], DEVICES, DEVICES[0])
    assert torch.equal(mapping["x"], x())


def test_mappings_without_tensors_are_shared():
    """A configuration, whose class nobody needs to know."""
    config, proxy = Keywords(rate=0.1, layers=[1, 2]), types.MappingProxyType({"a": {"b": 1}})
    args, _ = scatter_kwargs((x(), config, proxy), None, DEVICES)
    assert all(part[1] is config and part[2] is proxy for part in args)


def test_what_is_no_container():
    for obj in (None, 1, "text", torch.Size([2]), x(), deque([1]), {1}, object(), range(2), len):
        assert entries_of(obj) is None


def test_deques_keep_their_length():
    parts = [deque([torch.ones(1), rank], maxlen=2) for rank in range(2)]
    joined = gather(parts, DEVICES, DEVICES[0])
    assert type(joined) is deque and joined.maxlen == 2
    assert joined[0].tolist() == [1.0, 1.0] and joined[1].tolist() == [0, 1]


def test_registered_outputs_of_different_kinds_are_refused():
    with pytest.raises(TypeError, match="replica 0 returned Graph, but replica 1 returned list"):
        gather([Graph(x(), "a"), [x()]], DEVICES, DEVICES[0])


def test_a_constructor_that_loses_entries_is_not_believed():
    class Forgetful(Frozen):
        def __init__(self, data):
            super().__init__({key: data[key] for key in list(data)[:1]})

    mapping = Forgetful({"x": x()})
    mapping._data["y"] = x()
    with pytest.raises(TypeError, match="Forgetful"):
        rebuild(mapping, [x(), x()])
