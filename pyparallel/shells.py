"""Shells: copies of modules that are made without their constructors, and filled rank by rank."""

import copy
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pyparallel.mirror import without_mirror
from pyparallel.rewire import rewire

M = TypeVar("M", bound=nn.Module)


# Attributes that a replica has and the original may lack.
ADDED_TO_SHELLS = frozenset(("_former_parameters", "_is_replica", "zero_grad"))


class PerObject:
    """A place for what belongs to one object, and must not go with its attributes to a copy."""

    def __init__(self) -> None:
        self.content: Any = None

    def __deepcopy__(self, memo: Any) -> "PerObject":
        return PerObject()

    def __reduce__(self) -> tuple[Any, ...]:
        return PerObject, ()


def own_tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Returns every parameter and buffer once.

    Not network.parameters(), which users override in order to train some only.
    """
    parameters = chain.from_iterable(module._parameters.values() for module in modules)
    buffers = chain.from_iterable(module._buffers.values() for module in modules)
    unique = {id(tensor): tensor for tensor in chain(parameters, buffers) if tensor is not None}
    return list(unique.values())


def check_copyable(root: nn.Module) -> None:
    """Refuses parameters and buffers whose values are not in memory of their own, by name.

    Raises:
        ValueError: A lazy module has not seen its first batch.
        TypeError: A tensor subclass that keeps its data in other tensors.
    """
    for name, tensor in chain(root.named_parameters(), root.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(
                "Attempted to use an uninitialized parameter in DataParallel: "
                f"{name!r} has no shape yet. Run a forward of the module itself first"
            )
        has_own_operators = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        if has_own_operators and not _lies_in_memory(tensor):
            raise TypeError(
                f"DataParallel cannot copy {name!r} to other devices: a {type(tensor).__name__} "
                "keeps its data in other tensors. Use a plain parameter or buffer"
            )


def _lies_in_memory(tensor: Tensor) -> bool:
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # of tensors without a storage, in some versions of torch
        return False


def as_type_of(original: Tensor, output: Tensor) -> Tensor:
    """Gives the copy of a tensor the class and the Python attributes of the original.

    So it is a parameter if that is one. Not by the constructor, which would detach it.
    """
    if output is not original:
        if type(original) is not type(output):
            output.__class__ = type(original)
        copy_attributes(original, output)
    return output


def copy_attributes(original: Tensor, output: Tensor) -> None:
    """Gives the copy of a tensor the Python attributes of the original, and no others."""
    if original.__dict__ or output.__dict__:
        output.__dict__.clear()
        output.__dict__.update(original.__dict__)


def is_plain(module: nn.Module) -> bool:
    """Whether a shell is a new object with the attributes of the module, and nothing else."""
    method = type(module)._replicate_for_data_parallel
    # An RNN's method copies a list of weights, as rewiring does.
    return method in (
        nn.Module._replicate_for_data_parallel,
        nn.RNNBase._replicate_for_data_parallel,
    )


def make_shell(module: M) -> M:
    """Returns a replica whose tensors and sub-modules are still those of the original."""
    cls = type(module)
    if not is_plain(module):
        return cast(M, module._replicate_for_data_parallel())  # type: ignore[no-untyped-call]
    replica = cls.__new__(cls)
    fill_shell(module, replica)
    return replica


def fill_shell(module: nn.Module, replica: nn.Module) -> None:
    """Gives a shell the attributes of the original, and takes away all others."""
    # Not by attribute assignments: the module that torch.compile returns hands those on to the
    # user's module, which then loses its parameters.
    state = replica.__dict__
    state.clear()
    state.update(without_mirror(module))
    state["_is_replica"] = True
    for name, value in module.__dict__.items():
        if type(value) is PerObject:
            state[name] = PerObject()


def bind(
    module: nn.Module, replica: nn.Module, names: Sequence[str], substitutes: Mapping[int, Any]
) -> None:
    """Gives a shell the tensors and sub-modules of its rank.

    Args:
        module: The original.
        replica: Its shell.
        names: Attributes to rewire.
        substitutes: What stands for which object of the original's tree, by its ``id``.
    """
    if isinstance(replica, torch.jit.ScriptModule):
        # Its entries live in C++, where the replica has plain attributes in place of parameters.
        for entries in (module._modules, module._parameters, module._buffers):
            for key, value in entries.items():
                if value is not None:
                    setattr(replica, key, substitutes.get(id(value), value))
        return
    state = replica.__dict__
    for kind in ("_modules", "_parameters", "_buffers"):
        entries = copy.copy(module.__dict__[kind])  # a mirror's copy is a dict
        for key, value in entries.items():
            if value is not None:
                entries[key] = substitutes.get(id(value), value)
        state[kind] = entries
    # Where torch puts what it takes out of _parameters, and where some programs look for it.
    state["_former_parameters"] = state["_parameters"]
    for name in names:
        state[name] = rewire(state[name], substitutes)
    if type(replica).zero_grad is nn.Module.zero_grad:
        state["zero_grad"] = _zero_grad


def restore_compilation(replica: nn.Module) -> None:
    """Makes a compiled module run the replica instead of the original."""
    # If nobody imported dynamo, nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return
    state = replica.__dict__
    if isinstance(replica, dynamo.OptimizedModule):
        replica._initialize()
    compiled = state.get("_compiled_call_impl")
    if compiled is not None:
        # module.compile() wrapped a method of the original. Its context, which has the compiled
        # code, is found in the closure only; without it the replica runs uncompiled.
        code = getattr(compiled, "__code__", None)
        cells = dict(zip(code.co_freevars, compiled.__closure__ or (), strict=True)) if code else {}
        context = cells["self"].cell_contents if "self" in cells else None
        if isinstance(context, dynamo._TorchDynamoContext):
            state["_compiled_call_impl"] = context(replica._call_impl)
        else:
            state["_compiled_call_impl"] = None


def _zero_grad(set_to_none: bool = True) -> None:
    """Warns as torch does in a replica; reading .grad of non-leaf tensors would warn more."""
    replica = nn.Module()
    replica.__dict__["_is_replica"] = True
    replica.zero_grad(set_to_none)
