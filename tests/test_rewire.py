"""Attributes that lead into the original tree lead into the replica's."""

import functools
import weakref
from collections import OrderedDict

from torch import nn

from pyparallel.rewire import attributes_to_rewire, rewire


class Owner(nn.Module):
    def method(self, x):
        return self, x


OLD, NEW, OTHER = Owner(), Owner(), Owner()
SUBSTITUTES = {id(OLD): NEW}


def test_objects_of_the_tree_are_replaced_in_every_container():
    assert rewire(OLD, SUBSTITUTES) is NEW
    assert rewire([OLD, 1, [OTHER, (OLD,)]], SUBSTITUTES) == [NEW, 1, [OTHER, (NEW,)]]
    assert rewire({"a": OLD, OLD: "b"}, SUBSTITUTES) == {"a": NEW, NEW: "b"}
    ordered = rewire(OrderedDict(z=OLD, a=1), SUBSTITUTES)
    assert type(ordered) is OrderedDict
    assert list(ordered.items()) == [("z", NEW), ("a", 1)]
    assert rewire(weakref.ref(OLD), SUBSTITUTES)() is NEW


def test_bound_methods_and_partial_functions():
    assert rewire(OLD.method, SUBSTITUTES)(1) == (NEW, 1)
    assert rewire(functools.partial(OLD.method, x=2), SUBSTITUTES)() == (NEW, 2)
    assert rewire(functools.partial(print, OLD, end=OLD), SUBSTITUTES).args == (NEW,)
    assert rewire(functools.partial(print, OLD, end=OLD), SUBSTITUTES).keywords == {"end": NEW}


def test_what_leads_nowhere_is_the_same_object():
    for value in (
        OTHER,
        OTHER.method,
        [1, "a", None],
        [OTHER, [2]],
        {"a": [OTHER]},
        functools.partial(print, 1),
        weakref.ref(OTHER),
        len,
        {OTHER},
        print,
    ):
        assert rewire(value, SUBSTITUTES) is value


def test_a_list_that_holds_itself_ends():
    value = [1]
    value.append(value)
    assert rewire(value, SUBSTITUTES) is value


def test_attributes_to_rewire_leaves_hooks_and_entries_alone():
    root = nn.Module()
    child = root.child = Owner()
    root.layers = [child]
    root.names = ["child"]
    root.register_forward_hook(child.method)
    assert attributes_to_rewire([child, root], [root, child]) == [[], ["layers"]]
