"""The functions of ``torch.nn.parallel``, with their signatures, on GPUs and virtual devices.

They are the steps of ``DataParallel``, for code that calls them itself. Devices are written as for
``DataParallel``.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel.parallel_apply import get_a_var

from pyparallel import parallel_apply as apply
from pyparallel import replicate as copies
from pyparallel import scatter_gather
from pyparallel.data_parallel import DataParallel
from pyparallel.devices import Device, DeviceLike, host_if_minus_1, resolve_devices
from pyparallel.one_forward import data_parallel
from pyparallel.placement import destination_device

__all__ = [
    "DataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]

M = TypeVar("M", bound=nn.Module)


def scatter(
    inputs: Any, target_gpus: Iterable[DeviceLike], dim: int = 0
) -> tuple[Any, ...] | list[Any]:
    """Splits every tensor in ``inputs`` along ``dim``, as ``DataParallel`` does.

    Returns:
        The part of each used device: a tuple if ``inputs`` is a tensor, else a list.
    """
    args, _ = scatter_kwargs((inputs,), None, target_gpus, dim)
    parts = tuple(part for (part,) in args)
    return parts if isinstance(inputs, Tensor) else list(parts)


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Iterable[DeviceLike],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Returns positional and keyword arguments of each used device."""
    return scatter_gather.scatter_kwargs(inputs, kwargs, resolve_devices(target_gpus), dim)


def gather(outputs: Sequence[Any], target_device: DeviceLike | None, dim: int = 0) -> Any:
    """Joins the outputs of several devices, as ``DataParallel`` does.

    Args:
        outputs: One output a device, in the order of devices.
        target_device: Where the tensors go; "cpu" is host memory. An int is a device of their kind;
            None is the current GPU, or virtual device 0.
        dim: Dimension along which tensors are joined.
    """
    tensors = [get_a_var(output) for output in outputs]
    on_gpus = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    ranks = [Device("cpu", rank) for rank in range(len(outputs))]
    if on_gpus:
        # An output without tensors on GPUs needs a device in name only.
        gpus = [tensor.device.index if tensor is not None else None for tensor in tensors]
        ranks = [Device("cuda", gpu or 0) for gpu in gpus]
    target = destination_device(host_if_minus_1(target_device), ranks[0].kind)
    return scatter_gather.gather(outputs, ranks, target, dim)


def replicate(network: M, devices: Iterable[DeviceLike], detach: bool = False) -> list[M]:
    """Copies a module to every device, the first of which holds it.

    Args:
        network: The module.
        devices: The device of each replica.
        detach: Make copies that pass no gradient to the original.
    """
    return copies.replicate(network, resolve_devices(devices), detach)


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Iterable[DeviceLike] | None = None,
) -> list[Any]:
    """Calls each module with its inputs on its device, side by side.

    Args:
        modules: The modules.
        inputs: For each a list or tuple of positional arguments, or one argument of another type.
        kwargs_tup: For each the keyword arguments.
        devices: The device of each. Default: where its parameters and buffers are, or else the
            first tensor of its inputs; the current GPU, or a virtual device, if there is neither.

    Returns:
        The outputs, in the order of ``modules``.

    Raises:
        AssertionError: The arguments differ in length.
        BaseException: What a module raised, with its traceback and a note that says where.
    """
    if devices is None:
        places = [_place(module, args) for module, args in zip(modules, inputs, strict=False)]
        default = "cuda" if torch.cuda.is_available() else "cpu"
        kind = next((place.type for place in places if place is not None), default)
        devices = [torch.device(kind) if place is None else place for place in places]
    return apply.parallel_apply(modules, inputs, kwargs_tup, resolve_devices(devices))


def _place(module: nn.Module, args: Any) -> torch.device | None:
    tensor = next(chain(module.parameters(), module.buffers()), None)
    if tensor is None:
        tensor = get_a_var(args)
    return None if tensor is None else tensor.device
