"""Makes attributes of a replica that point into the original's tree point into its own.

Modules, parameters and buffers are found in attributes, and there in lists, tuples, named tuples,
dicts, ordered dicts and default dicts, partial functions, bound methods, weak references, and the
variables of closures, as decorators make them. Other objects are left as they are.
"""

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

from torch import nn

from pyparallel.mirror import without_mirror

# A list that holds itself ends here.
_MAX_DEPTH = 8

# Types of values that lead nowhere.
ATOMS = frozenset((NoneType, bool, int, float, complex, str, bytes))

_DICTS = (dict, OrderedDict, defaultdict)
_WEAK = (weakref.ref, weakref.WeakMethod, *weakref.ProxyTypes)

# Replicas share the hooks with the original, as in torch: a hook that is a bound method, and keeps
# what it sees, must keep it where the user looks for it. The tree itself is bound by replicate.
_BOUND_ELSEWHERE = frozenset(nn.Module().__dict__)


# Longer ones hold data rather than modules, and looking through them would take time.
_MAX_WATCHED_ENTRIES = 64


class _Placeholder:
    """Something that can be the owner of a method and the target of a weak reference."""


def attributes_to_rewire(modules: Iterable[nn.Module], tree: Iterable[Any]) -> list[list[str]]:
    """Returns for each module its attributes that lead to an object of ``tree``, by name."""
    placeholder = _Placeholder()
    substitutes = {id(value): placeholder for value in tree}
    return [
        [
            name
            for name, value in without_mirror(module).items()
            if name not in _BOUND_ELSEWHERE and rewire(value, substitutes) is not value
        ]
        for module in modules
    ]


def containers_of(module: nn.Module, rewired: Collection[str]) -> tuple[list[Any], list[CellType]]:
    """Returns what holds objects, or may come to, in a module's attributes.

    Args:
        module: A module.
        rewired: Its attributes that lead into the tree. Long containers are of interest here only.

    Returns:
        Lists and dicts, and variables of closures.
    """
    found: list[Any] = []
    for name, value in without_mirror(module).items():
        if name not in _BOUND_ELSEWHERE:
            limit = None if name in rewired else _MAX_WATCHED_ENTRIES
            _collect_containers(value, found, limit, 0)
    cells = [entry for entry in found if type(entry) is CellType]
    return [entry for entry in found if type(entry) is not CellType], cells


def containers_in(values: Iterable[Any]) -> list[Any]:
    """Returns the lists and dicts that hold objects, or may come to, in some values."""
    found: list[Any] = []
    for value in values:
        _collect_containers(value, found, None, 0)
    return [entry for entry in found if type(entry) is not CellType]


def _collect_containers(value: Any, found: list[Any], limit: int | None, depth: int) -> None:
    kind = type(value)
    if kind is functools.partial:
        items: Any = (*value.args, *value.keywords.values())
    elif kind is list or _is_plain_tuple(kind):
        items = value
    elif kind in _DICTS:
        items = value.values()
    elif kind is FunctionType and value.__closure__:
        cells = [cell for cell in value.__closure__ if not any(cell is other for other in found)]
        found += cells
        items = list(map(content_of, cells))
    else:
        return
    if depth > _MAX_DEPTH or (limit is not None and len(items) > limit):
        return
    if not items or not ATOMS.issuperset(map(type, items)):
        if kind is list or kind in _DICTS:
            found.append(value)
        for item in items:
            _collect_containers(item, found, limit, depth + 1)


def rewire(value: Any, substitutes: Mapping[int, Any], depth: int = 0) -> Any:
    """Replaces the objects in ``value`` whose ``id`` is a key of ``substitutes``.

    Returns:
        ``value`` itself if nothing in it is replaced, else a new object of its type.
    """
    kind = type(value)
    if kind in ATOMS or depth > _MAX_DEPTH:
        return value
    if id(value) in substitutes:
        return substitutes[id(value)]
    if kind is MethodType:
        owner = substitutes.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if kind in _WEAK:
        return _rewire_weak(value, substitutes)
    if kind is functools.partial:
        old = (value.func, value.args, value.keywords)
        new = tuple(rewire(part, substitutes, depth + 1) for part in old)
        if _same(old, new):
            return value
        partial = functools.partial(new[0], *new[1], **new[2])
        partial.__dict__.update(rewire(value.__dict__, substitutes, depth + 1))
        return partial
    if kind is FunctionType and value.__closure__:
        return _rewire_closure(value, substitutes, depth)
    if kind is list or _is_plain_tuple(kind):
        if ATOMS.issuperset(map(type, value)):
            return value
        items = [rewire(item, substitutes, depth + 1) for item in value]
        return value if _same(value, items) else getattr(kind, "_make", kind)(items)
    if kind in _DICTS:
        flat = list(chain(value.keys(), value.values()))
        if ATOMS.issuperset(map(type, flat)):
            return value
        items = [rewire(item, substitutes, depth + 1) for item in flat]
        if _same(flat, items):
            return value
        is_default = kind is defaultdict
        result: Any = defaultdict(value.default_factory) if is_default else kind()
        result.update(zip(items[: len(value)], items[len(value) :], strict=True))
        return result
    return value


def _is_plain_tuple(kind: type) -> bool:
    return kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _rewire_weak(reference: Any, substitutes: Mapping[int, Any]) -> Any:
    kind = type(reference)
    if kind is weakref.WeakMethod:
        method = reference()
        bound = rewire(method, substitutes)
        return reference if bound is method else weakref.WeakMethod(bound)
    try:
        # A proxy hides what it stands for, but not from bound methods.
        target = reference() if kind is weakref.ref else reference.__repr__.__self__
    except (ReferenceError, AttributeError):
        return reference
    substitute = substitutes.get(id(target))
    if substitute is None:
        return reference
    return weakref.ref(substitute) if kind is weakref.ref else weakref.proxy(substitute)


def _rewire_closure(function: FunctionType, substitutes: Mapping[int, Any], depth: int) -> Any:
    """Replaces objects in the variables that a function has from outside; others stay shared."""
    cells = function.__closure__ or ()
    old = list(map(content_of, cells))
    # Functions refer to each other, or to themselves, so the search ends sooner among them.
    new = [rewire(content, substitutes, depth + 2) for content in old]
    if _same(old, new):
        return function
    substituted = {
        id(cell): CellType(b) for cell, a, b in zip(cells, old, new, strict=True) if a is not b
    }
    result = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(substituted.get(id(cell), cell) for cell in cells),
    )
    result.__kwdefaults__ = function.__kwdefaults__
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(result, name, getattr(function, name))
    result.__dict__.update(rewire(function.__dict__, substitutes, depth + 1))
    return result


def content_of(cell: CellType) -> Any:
    """Returns the value of a variable of a closure; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))
