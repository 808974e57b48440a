"""Parameters and buffers of a replica as plain attributes, too.

``module.weight`` is found in ``module.__dict__`` several times faster than through the
``__getattr__`` of ``nn.Module``, which looks into ``_parameters``. Both stay equal, because the
dicts of a replica that hold the tensors write through.
"""

import functools
import weakref
from typing import Any

from torch import nn

_KINDS = ("_parameters", "_buffers")


class MirroredEntries(dict[str, Any]):
    """``_parameters`` or ``_buffers`` of a module; what is written here appears as an attribute."""

    def __init__(self, entries: dict[str, Any], module: "weakref.ref[nn.Module]") -> None:
        super().__init__(entries)
        self._module = module
        self._attributes().update(entries)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._attributes()[key] = value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._attributes().pop(key, None)

    def __ior__(self, other: Any) -> "MirroredEntries":  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def clear(self) -> None:
        """Removes everything."""
        for key in list(self):
            del self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Removes an entry and returns its value."""
        self._attributes().pop(key, None)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        """Removes the last entry and returns it."""
        key, value = super().popitem()
        self._attributes().pop(key, None)
        return key, value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Returns the value of an entry, which is made if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Writes several entries."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def _attributes(self) -> dict[str, Any]:
        module = self._module()
        # A dict that outlived its module mirrors nothing.
        return {} if module is None else module.__dict__


def mirror(module: nn.Module) -> None:
    """Makes the tensors of a replica attributes. Modules that are not torch's own keep as they are.

    Those may look into their ``__dict__``, or be copied in their own way.
    """
    state = module.__dict__
    if not type(module).__module__.startswith("torch.nn.modules."):
        return
    if not any(state[kind] for kind in _KINDS) or any(type(state[k]) is not dict for k in _KINDS):
        return
    owner = weakref.ref(module)
    for kind in _KINDS:
        state[kind] = MirroredEntries(state[kind], owner)
    if "_former_parameters" in state:
        state["_former_parameters"] = state["_parameters"]
    # A copy has ordinary dicts, so it must not have the attributes.
    state["__getstate__"] = functools.partial(_state_of, owner)


def mirrored(module: nn.Module) -> set[str]:
    """Returns the attributes that ``mirror`` added."""
    state = module.__dict__
    if type(state.get("_parameters")) is not MirroredEntries:
        return set()
    return {"__getstate__", *state["_parameters"], *state["_buffers"]}


def without_mirror(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that are its own."""
    added = mirrored(module)
    if not added:
        return module.__dict__
    own = {key: value for key, value in module.__dict__.items() if key not in added}
    own.update((kind, dict(module.__dict__[kind])) for kind in _KINDS)
    return own


def _state_of(owner: "weakref.ref[nn.Module]") -> dict[str, Any]:
    module = owner()
    assert module is not None
    return without_mirror(module)
