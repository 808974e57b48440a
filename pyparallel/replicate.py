"""Replicas: one copy of a module for each rank, with its own parameters and buffers."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.parallel.replicate import _replicatable_module

from pyparallel.bucket import assign_buckets
from pyparallel.bucket_functions import Bucket
from pyparallel.communicator import get_communicator
from pyparallel.devices import Device
from pyparallel.functions import Broadcast, broadcast
from pyparallel.rewire import attributes_to_rewire
from pyparallel.shells import (
    as_type_of,
    bind,
    check_copyable,
    make_shell,
    own_tensors,
    restore_compilation,
)

M = TypeVar("M", bound=nn.Module)

# A bucket's is that of a persistent replica which the engine has given up meanwhile, as it does
# when many threads have one each.
_COPYING_NODES: tuple[type, ...] = (Broadcast._backward_cls, Bucket._backward_cls)


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
        TypeError: A tensor subclass that keeps its data in other tensors.
    """
    if not _replicatable_module(network):
        raise RuntimeError(
            "Cannot replicate network where python modules are children of ScriptModule"
        )
    if not devices:
        return []
    check_copyable(network)
    modules = list(network.modules())
    tensors = own_tensors(modules)
    copies = _broadcast(tensors, devices, detach)
    originals: list[Any] = [*modules, *tensors]
    to_rewire = attributes_to_rewire(modules, originals)
    replicas = []
    for row in copies:
        shells = [make_shell(module) for module in modules]
        substitutes = {
            id(original): substitute
            for original, substitute in zip(originals, chain(shells, row), strict=True)
        }
        for module, shell, names in zip(modules, shells, to_rewire, strict=True):
            bind(module, shell, names, substitutes)
        for shell in shells:
            restore_compilation(shell)
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
        if node is not None and not isinstance(node, _COPYING_NODES):
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: "
                f"forward modified the parameter {name!r}; use torch.no_grad() or a copy of it"
            )


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
                row[k] = as_type_of(tensors[k], output)
    return copies
