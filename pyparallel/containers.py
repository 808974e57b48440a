"""Containers, taken apart into their entries and rebuilt around others.

Lists, tuples, mappings and what is registered with ``torch.utils._pytree`` are containers.
"""

import copy
from collections import UserDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyparallel.rewire import ATOMS


def entries_of(obj: Any) -> list[Any] | None:
    """Returns what a container holds, in order; None for any other object.

    Raises:
        TypeError: A PackedSequence.
    """
    kind = type(obj)
    if kind is tuple or kind is list:
        return list(obj)
    if kind is dict:
        return list(obj.values())
    if kind in ATOMS or isinstance(obj, Tensor):
        return None
    if isinstance(obj, PackedSequence):
        raise TypeError(
            "a PackedSequence has no batch dimension to split or join: pass the padded tensor "
            "and the lengths, pack them inside forward, and return padded tensors"
        )
    if isinstance(obj, (tuple, list)) and not isinstance(obj, torch.Size):
        return list(obj)
    if isinstance(obj, Mapping):
        return [obj[key] for key in obj]
    node = _as_node(obj)
    return None if node is None else node[0]


def rebuild(obj: Any, entries: list[Any]) -> Any:
    """Returns a container of the type of ``obj``, with its keys and attributes and other entries.

    Subclasses have constructors of their own kind, as ``defaultdict`` has, so they are copied. What
    cannot be copied may have a constructor that takes a dict.

    Raises:
        TypeError: Neither way makes such a container.
    """
    kind = type(obj)
    if kind in (list, tuple):
        return kind(entries)
    if kind is dict:
        return dict(zip(obj, entries, strict=True))
    if isinstance(obj, tuple):
        if hasattr(obj, "n_sequence_fields"):  # torch.return_types, which has this way only
            return kind(entries)
        result = tuple.__new__(kind, entries)
        getattr(result, "__dict__", {}).update(getattr(obj, "__dict__", {}))
        return result
    if isinstance(obj, deque):
        result = copy.copy(obj)
        result.clear()
        result.extend(entries)
        return result
    if isinstance(obj, (list, Mapping)):
        for way in (_filled_copy, _constructed, _unflattened):
            # Code of the user's, which may raise anything if this way is not meant.
            with suppress(Exception):
                result = way(obj, entries)
                if type(result) is kind and _holds(result, obj, entries):
                    return result
        raise TypeError(
            f"a {kind.__name__} with tensors can neither be copied and filled nor be made from a "
            "dict: pass or return a dict or list instead, or register the class with "
            "torch.utils._pytree.register_pytree_node"
        )
    return _unflattened(obj, entries)


def _filled_copy(obj: Any, entries: list[Any]) -> Any:
    if not isinstance(obj, (list, dict, UserDict)):
        raise TypeError  # the copy may share its contents with the original
    result = copy.copy(obj)
    if isinstance(obj, list):
        result[:] = entries
    else:
        for key, entry in zip(obj, entries, strict=True):
            result[key] = entry
    return result


def _constructed(obj: Any, entries: list[Any]) -> Any:
    make: Callable[[Any], Any] = type(obj)
    return make(dict(zip(obj, entries, strict=True)) if isinstance(obj, Mapping) else entries)


def _unflattened(obj: Any, entries: list[Any]) -> Any:
    node = _as_node(obj)
    if node is None:
        raise TypeError
    return tree_unflatten(entries, node[1])


def _as_node(obj: Any) -> tuple[list[Any], TreeSpec] | None:
    """Returns the children of an object whose class is registered, and how to put them back."""
    children, spec = tree_flatten(obj, is_leaf=lambda other: other is not obj)
    is_leaf = not children or (len(children) == 1 and children[0] is obj)
    return None if is_leaf or isinstance(obj, (torch.Size, deque)) else (children, spec)


def _holds(result: Any, obj: Any, entries: list[Any]) -> bool:
    """Whether ``result`` has the keys of ``obj`` and these tensors; it may convert the rest."""
    found = entries_of(result) or []
    if isinstance(obj, Mapping) and list(result) != list(obj):
        return False
    return len(found) == len(entries) and all(
        new is entry for new, entry in zip(found, entries, strict=True) if isinstance(entry, Tensor)
    )
