"""Replicas: one copy of a module for each rank, with its own parameters and buffers."""

import copy
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel.replicate import _replicatable_module

from pyparallel.bucket import assign_buckets
from pyparallel.communicator import get_communicator
from pyparallel.devices import Device
from pyparallel.functions import Broadcast, broadcast
from pyparallel.rewire import attributes_to_rewire, rewire

M = TypeVar("M", bound=nn.Module)


def replicate(network: M, devices: Sequence[Device], detach: bool = False) -> list[M]:
    """Copies a module to every device.

    A replica is made without its constructor: it has the attributes of the original, and its own
    tensors, sub-modules and containers of them (see ``rewire``). Its parameters are real entries of
    ``parameters()`` and ``state_dict()``, although autograd computed them. Rank 0 shares memory
    with the original: its buffers, and the parameters that need no gradient here, are the very
    objects, so that what forward writes into them in place stays. Whatever else forward changes on
    a replica is forgotten with it. A replica that holds a bound method of its own, or its parent in
    a list, is a reference cycle, as the original is: the garbage collector frees it.

    Args:
        network: All its tensors are on ``devices[0]``.
        devices: The device of each rank.
        detach: Make copies that pass no gradient to the original.

    Returns:
        One replica a rank, in the order of ``devices``.

    Raises:
        RuntimeError: Python modules below a ScriptModule.
        ValueError: A parameter of a lazy module has no shape yet.
    """
    if not _replicatable_module(network):
        raise RuntimeError(
            "Cannot replicate network where python modules are children of ScriptModule"
        )
    if not devices:
        return []
    modules = list(network.modules())
    tensors = _own_tensors(modules)
    copies = _broadcast(tensors, devices, detach)
    originals: list[Any] = [*modules, *tensors]
    to_rewire = [attributes_to_rewire(module, originals) for module in modules]
    replicas = []
    for row in copies:
        shells = [_shell(module) for module in modules]
        substitutes = {
            id(original): substitute
            for original, substitute in zip(originals, chain(shells, row), strict=True)
        }
        for module, shell, names in zip(modules, shells, to_rewire, strict=True):
            _bind(module, shell, names, substitutes)
        for shell in shells:
            _restore_compilation(shell)
        replicas.append(cast(M, shells[0]))
    return replicas


def check_not_modified(replica: nn.Module) -> None:
    """Refuses a forward that wrote a parameter in place while autograd was recording.

    Rank 0 shares memory with the original, so the write would stay in it. On one device autograd
    refuses it by itself.

    Raises:
        RuntimeError: Names the parameter.
    """
    for name, parameter in replica.named_parameters():
        node = parameter.grad_fn
        if node is not None and not isinstance(node, Broadcast._backward_cls):
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: "
                f"forward modified the parameter {name!r}; use torch.no_grad() or a copy of it"
            )


def _own_tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Every parameter and buffer once.

    Not network.parameters(), which users override in order to train some only.
    """
    parameters = chain.from_iterable(module._parameters.values() for module in modules)
    buffers = chain.from_iterable(module._buffers.values() for module in modules)
    unique = {id(tensor): tensor for tensor in chain(parameters, buffers) if tensor is not None}
    return list(unique.values())


def _broadcast(
    tensors: Sequence[Tensor], devices: Sequence[Device], detach: bool
) -> list[list[Tensor]]:
    """Returns ``[rank][k]``, the tensors of each rank, of the types of the originals."""
    communicator = get_communicator(devices)
    copies = [list(tensors) for _ in devices]
    for bucket in assign_buckets(tensors):
        members = [tensors[k] for k in bucket]
        if members[0].requires_grad and not detach:
            rows = broadcast(communicator, members)
        else:
            rows = communicator.broadcast(members)
        for row, outputs in zip(copies, rows, strict=True):
            for k, output in zip(bucket, outputs, strict=True):
                row[k] = _as_type_of(tensors[k], output)
    return copies


def _as_type_of(original: Tensor, output: Tensor) -> Tensor:
    """Makes the copy of a parameter a parameter, without the constructor, which would detach it."""
    if output is not original and isinstance(original, nn.Parameter):
        output.__class__ = type(original)
        output.__dict__.update(original.__dict__)
    return output


def _shell(module: M) -> M:
    """A replica whose tensors and sub-modules are still those of the original."""
    cls = type(module)
    if cls._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        return cast(M, module._replicate_for_data_parallel())  # type: ignore[no-untyped-call]
    # What nn.Module does there, but without its attribute assignments: the module that
    # torch.compile returns hands those on to the user's module, which then loses its parameters.
    replica = cls.__new__(cls)
    replica.__dict__.update(module.__dict__)
    replica.__dict__["_is_replica"] = True
    return replica


def _bind(
    module: nn.Module, replica: nn.Module, names: Sequence[str], substitutes: Mapping[int, Any]
) -> None:
    """Gives a replica the tensors and sub-modules of its rank."""
    children, parameters, buffers = (
        {key: substitutes.get(id(value), value) for key, value in entries.items()}
        for entries in (module._modules, module._parameters, module._buffers)
    )
    if isinstance(replica, torch.jit.ScriptModule):
        # Its entries live in C++, where the replica has plain attributes in place of parameters.
        for key, value in chain(children.items(), parameters.items(), buffers.items()):
            if value is not None:
                setattr(replica, key, value)
        return
    state = replica.__dict__
    for kind, entries in (
        ("_modules", children),
        ("_parameters", parameters),
        ("_buffers", buffers),
    ):
        state[kind] = copy.copy(module.__dict__[kind])
        state[kind].update(entries)
    for name in names:
        state[name] = rewire(state[name], substitutes)
    if type(replica).zero_grad is nn.Module.zero_grad:
        state["zero_grad"] = _zero_grad


def _zero_grad(set_to_none: bool = True) -> None:
    """Warns as torch does in a replica; reading .grad of non-leaf tensors would warn more."""
    replica = nn.Module()
    replica.__dict__["_is_replica"] = True
    replica.zero_grad(set_to_none)


def _restore_compilation(replica: nn.Module) -> None:
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
