"""Arguments of forward that are modules of the wrapped tree: each replica gets its own ones.

A method is called through the wrapper by passing it, or the module, to a forward that calls it.
Handed on as they are, all replicas would use the first device's module.
"""

import functools
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from pyparallel.rewire import rewire


def with_own_modules(
    module: nn.Module,
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]],
) -> tuple[Sequence[Any], Sequence[dict[str, Any]]]:
    """Puts modules of a replica in place of those of the original in its arguments.

    Modules are found in lists, tuples and dicts, and as owners of bound methods and in partial
    functions and closures.

    Args:
        module: The original.
        replicas: The replica of each rank. Nothing is replaced if they have other modules, as those
            that a subclass made may have.
        inputs: Positional arguments of each rank.
        kwargs: Keyword arguments of each rank.

    Returns:
        The arguments of each rank.
    """
    if not replicas or not (_may_lead_to_module(inputs[0]) or _may_lead_to_module(kwargs[0])):
        return inputs, kwargs
    originals = list(module.modules())
    args, keywords = list(inputs), list(kwargs)
    for rank, replica in enumerate(replicas):
        own = list(replica.modules())
        if len(own) == len(originals):
            substitutes = dict(zip(map(id, originals), own, strict=True))
            args[rank] = rewire(args[rank], substitutes)
            keywords[rank] = rewire(keywords[rank], substitutes)
    return args, keywords


def _may_lead_to_module(value: Any) -> bool:
    kind = type(value)
    if kind is list or isinstance(value, tuple):
        return any(map(_may_lead_to_module, value))
    if isinstance(value, dict):
        return any(map(_may_lead_to_module, value.values()))
    if kind is FunctionType:
        return bool(value.__closure__)
    return kind in (MethodType, functools.partial) or isinstance(value, nn.Module)
