"""What a module consisted of when it was last looked at, and what has changed since.

Detection is a walk by identity in the compiled core: modules (type, attributes, entries), the
containers among their attributes that replicas have copies of, attributes of tensors, and what
describes a tensor's memory. Values of tensors are not looked at here: the transfer compares them.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pyparallel import _C
from pyparallel.layout import is_dense
from pyparallel.rewire import ATOMS, attributes_to_rewire, containers_of, content_of
from pyparallel.shells import check_copyable, is_plain, own_tensors
from pyparallel.tensor_layouts import layouts_of

_Tensor: Any = torch._C.TensorBase


class ModuleState:
    """The modules and tensors below a root, and snapshots of all that replicas are made of.

    Attributes:
        modules: All modules, the root first.
        tensors: Every parameter and buffer once.
        originals: Both: everything for which a replica has a substitute.
        entries: For each module its tensors: (name of the dict, key, position in ``tensors``).
        rewired: For each module the names of the attributes that lead into the tree.
    """

    def __init__(self, modules: list[nn.Module], tensors: list[Tensor]) -> None:
        self.modules = modules
        self.tensors = tensors
        self.originals: list[Any] = [*modules, *tensors]
        position = {id(tensor): k for k, tensor in enumerate(tensors)}
        self.entries = [
            [
                (kind, key, position[id(tensor)])
                for kind in ("_parameters", "_buffers")
                for key, tensor in module.__dict__[kind].items()
                if tensor is not None
            ]
            for module in modules
        ]
        self.rewired = attributes_to_rewire(modules, self.originals)
        self._structures = [_structure(module) for module in modules]
        self._find_containers()
        self._look()
        self.look_at_memory()
        self._valid = True

    def look_at_memory(self) -> None:
        """Takes the present description of all tensors as the reference."""
        # p.data = other moves no version counter, so this is read at each forward.
        self._layouts = layouts_of(self.tensors)
        self._gradients = _C.AttributeSnapshot(self.tensors, [_Tensor.requires_grad])
        lazy = [tensor for tensor in self.tensors if tensor.is_complex()]
        self._conjugations = _C.AttributeSnapshot(lazy, [_Tensor.is_conj])

    def memory_changed(self) -> bool:
        """Whether a tensor lies elsewhere, or became another kind of tensor."""
        return (
            self._layouts.check() != -1
            or self._gradients.check() != -1
            or self._conjugations.check() != -1
        )

    def changes(self) -> tuple[list[int], list[int]] | None:
        """Finds what changed since the last call, and takes it as the new reference.

        Returns:
            Positions of the modules and of the tensors whose attributes changed. None if modules or
            tensors came, went or were replaced, until they are the old ones again.
        """
        if not self._valid:
            return self._look_at_all()
        index = self._identities.check()
        changed = self._changed_variables() if self._values else {}
        if index == -1 and not changed:
            return _NOTHING
        tensors: list[int] = []
        while index != -1:
            self._identities.update(index)
            if index < len(self._owners):
                changed[self._owners[index]] = None
            else:
                tensors.append(index - len(self._owners))
            index = self._identities.check(index + 1)
        modules = [self.modules[i] for i in changed]
        for i, module in zip(changed, modules, strict=True):
            if not _same_structure(self._structures[i], _structure(module)):
                self._valid = False
                return None
        look_again = False
        rewired = attributes_to_rewire(modules, self.originals)
        for i, module, names in zip(changed, modules, rewired, strict=True):
            self.rewired[i] = names
            found = containers_of(module, self.rewired[i])
            if _differ(found[0], self._containers[i]) or _differ(found[1], self._variables[i]):
                self._containers[i], self._variables[i] = found
                look_again = True
        if look_again:
            self._look()
        return list(changed), tensors

    def _look_at_all(self) -> tuple[list[int], list[int]] | None:
        for structure, module in zip(self._structures, self.modules, strict=True):
            if not _same_structure(structure, _structure(module)):
                return None
        self._valid = True
        self.rewired = attributes_to_rewire(self.modules, self.originals)
        self._find_containers()
        self._look()
        return list(range(len(self.modules))), list(range(len(self.tensors)))

    def _look(self) -> None:
        containers = list(chain.from_iterable(self._containers))
        self._owners = [
            *range(len(self.modules)),
            *chain.from_iterable([i] * len(own) for i, own in enumerate(self._containers)),
        ]
        self._identities = _C.IdentitySnapshot([*self.modules, *containers, *self.tensors])
        self._values = [
            (i, cell, content_of(cell)) for i, own in enumerate(self._variables) for cell in own
        ]

    def _find_containers(self) -> None:
        found = list(map(containers_of, self.modules, self.rewired))
        self._containers = [containers for containers, _ in found]
        self._variables = [cells for _, cells in found]

    def _changed_variables(self) -> dict[int, None]:
        """Returns the modules with closures whose variables have other values than before."""
        now = [(i, cell, content_of(cell)) for i, cell, _ in self._values]
        # Numbers and text do not matter: a variable that holds such is shared with the replicas.
        changed = {
            i: None
            for (i, _, old), (_, _, new) in zip(self._values, now, strict=True)
            if old is not new and not ATOMS.issuperset((type(old), type(new)))
        }
        self._values = now
        return changed


def _differ(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return list(map(id, old)) != list(map(id, new))


_NOTHING: tuple[list[int], list[int]] = ([], [])


def look(root: nn.Module) -> ModuleState | None:
    """Returns the state of the modules below ``root``; None if replicas of them cannot be kept.

    They can if all modules are plain ones and all tensors are dense blocks of memory that autograd
    did not compute.

    Raises:
        ValueError, TypeError: See ``check_copyable``.
    """
    check_copyable(root)
    modules = list(root.modules())
    if not all(map(is_plain, modules)):
        return None
    tensors = own_tensors(modules)
    return ModuleState(modules, tensors) if all(map(_can_persist, tensors)) else None


def _can_persist(tensor: Tensor) -> bool:
    return (
        (type(tensor) is Tensor or issubclass(type(tensor), nn.Parameter))
        and tensor.is_leaf
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and is_dense(tensor)
    )


def _structure(module: nn.Module) -> tuple[Any, ...]:
    state = module.__dict__
    return (
        type(module),
        dict(state["_modules"]),
        dict(state["_parameters"]),
        dict(state["_buffers"]),
    )


def _same_structure(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return old[0] is new[0] and all(
        list(a) == list(b) and all(a[key] is b[key] for key in a)
        for a, b in zip(old[1:], new[1:], strict=True)
    )
