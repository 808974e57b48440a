"""Attributes that lead into the original tree lead into the replica's."""

import functools
import weakref
from collections import OrderedDict, defaultdict, namedtuple

from torch import nn

from pyparallel.rewire import attributes_to_rewire, containers_in, rewire


class Owner(nn.Module):
    def method(self, x):
        return self, x


OLD, NEW, OTHER = Owner(), Owner(), Owner()
SUBSTITUTES = {id(OLD): NEW}
Pair = namedtuple("Pair", ["first", "second"])


def test_objects_of_the_tree_are_replaced_in_every_container():
    assert rewire(OLD, SUBSTITUTES) is NEW
    assert rewire([OLD, 1, [OTHER, (OLD,)]], SUBSTITUTES) == [NEW, 1, [OTHER, (NEW,)]]
    assert rewire({"a": OLD, OLD: "b"}, SUBSTITUTES) == {"a": NEW, NEW: "b"}
    ordered = rewire(OrderedDict(z=OLD, a=1), SUBSTITUTES)
    assert type(ordered) is OrderedDict
    assert list(ordered.items()) == [("z", NEW), ("a", 1)]
    default = rewire(defaultdict(list, a=[OLD]), SUBSTITUTES)
    assert default == {"a": [NEW]} and default["b"] == []
    assert containers_in([Pair(1, defaultdict(list, a=[OLD]))]) == [{"a": [OLD]}, [OLD]]
    assert rewire(Pair(OLD, 1), SUBSTITUTES) == Pair(NEW, 1)
    assert type(rewire([Pair(1, [OLD])], SUBSTITUTES)[0]) is Pair


def test_weak_references():
    assert rewire(weakref.ref(OLD), SUBSTITUTES)() is NEW
    assert rewire(weakref.WeakMethod(OLD.method), SUBSTITUTES)()(1) == (NEW, 1)
    assert rewire([weakref.proxy(OLD)], SUBSTITUTES)[0].method(1) == (NEW, 1)
    gone = Owner()
    kinds = weakref.ref, weakref.proxy, lambda owner: weakref.WeakMethod(owner.method)
    references = [make(owner) for make in kinds for owner in (OTHER, gone)]
    del gone
    for reference in references:
        assert rewire(reference, SUBSTITUTES) is reference


def test_bound_methods_and_partial_functions():
    assert rewire(OLD.method, SUBSTITUTES)(1) == (NEW, 1)
    assert rewire(functools.partial(OLD.method, x=2), SUBSTITUTES)() == (NEW, 2)
    assert rewire(functools.partial(print, OLD, end=OLD), SUBSTITUTES).args == (NEW,)
    assert rewire(functools.partial(print, OLD, end=OLD), SUBSTITUTES).keywords == {"end": NEW}


def test_what_a_partial_function_wraps_is_bound_anew():
    """As accelerate's hooks leave it: inspect.signature follows __wrapped__."""
    partial = functools.update_wrapper(functools.partial(print, OLD), OLD.method)
    result = rewire(partial, SUBSTITUTES)
    assert result.__wrapped__(1) == (NEW, 1) and result.__name__ == "method"
    assert partial.__wrapped__(1) == (OLD, 1)


def decorated(function, factor=3):
    @functools.wraps(function)
    def wrapper(*args, scale=2):
        nonlocal factor
        factor += 1
        return function(*args), factor * scale

    return wrapper


def test_closures():
    old = decorated(OLD.method)
    new = rewire(old, SUBSTITUTES)
    assert new(1) == ((NEW, 1), 8) and old(1) == ((OLD, 1), 10)  # they share the counter
    assert new(1, scale=1) == ((NEW, 1), 6)
    assert new.__name__ == "method" and new.__wrapped__(1) == (NEW, 1)
    assert old.__wrapped__(1) == (OLD, 1)
    assert rewire([decorated(decorated(OLD.method))], SUBSTITUTES)[0](1)[0][0] == (NEW, 1)
    assert rewire(lambda default=OLD: OLD, {**SUBSTITUTES, id(OTHER): OLD})() is OLD  # a global


def test_closures_that_call_themselves_end():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n > 0 and even(n - 1)

    def unset():
        return later

    assert rewire([even, odd, unset], SUBSTITUTES) == [even, odd, unset]
    later = OLD


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
        lambda: OLD,
        decorated(OTHER.method),
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
