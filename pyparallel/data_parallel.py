"""DataParallel, and the same as a function."""

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel.data_parallel import _check_balance

from pyparallel import env
from pyparallel.devices import Device, DeviceLike, resolve_devices
from pyparallel.dispatch import Dispatch, Dispatcher
from pyparallel.parallel_apply import parallel_apply
from pyparallel.replicate import check_not_modified, replicate
from pyparallel.scatter_gather import gather, scatter_kwargs

# Of ``data_parallel``, whose wrappers live for one call.
_dispatchers: WeakKeyDictionary[nn.Module, dict[str, Dispatcher]] = WeakKeyDictionary()

T = TypeVar("T", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


def _untraced(method: F) -> F:
    """Keeps torch.compile out of a step that works on the objects themselves, not on tensors."""

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        # Not at import: it imports dynamo, which takes seconds.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return method(*args, **kwargs)

    return cast(F, step)


class DataParallel(nn.DataParallel[T]):
    """Runs a module on several devices, each with its share of the batch.

    A drop-in for ``torch.nn.DataParallel``. Each forward splits the inputs (see ``scatter``),
    copies the module to every device in use, runs the copies, and joins their outputs on
    ``output_device``. Backward sums the gradients of all copies into the parameters of ``module``,
    bucket by bucket, while it still runs.

    ``module`` stays the only owner of the weights: optimizers, checkpoints (keys begin with
    ``module.``) and any other code use it as without the wrapper, and each forward sees all
    changes. In-place writes to buffers, such as BatchNorm's statistics, stay if made on the first
    device; other changes that forward makes to its copy are forgotten.

    With one device the module itself runs there. Without any it runs where it is, with the inputs
    as they are.

    Args:
        module: Its parameters and buffers must be on ``device_ids[0]`` when forward is called.
        device_ids: Devices, the first of which holds the module. Ints and "cuda:i" are GPUs,
            "cpu:i" are virtual devices (``virtual_devices``); with PYPARALLEL_VIRTUAL_DEVICES=n
            ints are virtual devices too. A device may occur several times. Default: all GPUs, or
            the n virtual devices. Empty: no device. On a machine without GPUs, GPUs count as no
            device, as in torch.
        output_device: Where outputs are joined; "cpu" or -1 means host memory. Default:
            ``device_ids[0]``.
        dim: Dimension along which all tensors are split and joined.
        dispatch: "threads" runs the copies at once, "sequential" one after the other, "auto" the
            way that it measures to be faster; see ``Dispatcher``.

    Attributes:
        module: The wrapped module.
        device_ids: Indices of the devices, as ints.
        output_device: An int, or ``torch.device("cpu")`` for host memory; None without devices.
        src_device_obj: The device of the module's tensors; for virtual devices
            ``torch.device("cpu")``, which has no index; None without devices.
        dim: As given.

    Raises:
        ValueError: A device that does not exist, GPUs mixed with virtual devices, or an unknown
            ``dispatch``.
        RuntimeError: From forward: a parameter or buffer is not on ``device_ids[0]``.

    Subclasses may override ``replicate``, ``scatter``, ``parallel_apply`` and ``gather``, as in
    torch.
    """

    output_device: int | torch.device | None  # type: ignore[assignment]
    src_device_obj: torch.device | None  # type: ignore[assignment]

    def __init__(
        self,
        module: T,
        device_ids: Iterable[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        dispatch: Dispatch = "auto",
    ) -> None:
        # Not torch's constructor, which knows no virtual devices.
        nn.Module.__init__(self)
        self._configure(module, device_ids, output_device, dim)
        self._dispatcher = Dispatcher(dispatch)
        if self.src_device_obj is None:
            return
        if self.src_device_obj.type == "cuda":
            _check_balance(self.device_ids)
        if len(self.device_ids) == 1:
            self.module.to(self.src_device_obj)

    def _configure(
        self,
        module: T,
        device_ids: Iterable[DeviceLike] | None,
        output_device: DeviceLike | None,
        dim: int,
    ) -> None:
        devices = _present_devices(device_ids)
        self.module = module
        self.dim = dim
        self.device_ids = [device.index for device in devices]
        self.output_device = None
        self.src_device_obj = devices[0].torch_device if devices else None
        if devices:
            self.output_device = self.device_ids[0]
            if output_device is not None:
                target = self._target(output_device)
                on_host = -1 if output_device == -1 else torch.device("cpu")
                self.output_device = on_host if target is None else target.index

    @_untraced
    def replicate(self, module: T, device_ids: Sequence[Any]) -> list[T]:
        """Returns a copy of ``module`` for each device; without gradients if they are off."""
        return replicate(module, self._devices(device_ids), not torch.is_grad_enabled())

    @_untraced
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Returns positional and keyword arguments of each device; see ``scatter_kwargs``."""
        return scatter_kwargs(inputs, kwargs, self._devices(device_ids), self.dim)

    @_untraced
    def parallel_apply(
        self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Returns what each replica makes of its arguments; see ``parallel_apply``."""
        devices = self._devices(self.device_ids[: len(replicas)])
        outputs = parallel_apply(replicas, inputs, kwargs, devices, self._dispatcher)
        if type(self).replicate is DataParallel.replicate:
            check_not_modified(replicas[0])
        return outputs

    @_untraced
    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the outputs of the replicas."""
        devices = self._devices(self.device_ids[: len(outputs)])
        return gather(outputs, devices, self._target(output_device), self.dim)

    def _devices(self, device_ids: Iterable[Any]) -> list[Device]:
        """An int is a device of this wrapper's kind, whatever the environment says by now."""
        on_gpus = cast(torch.device, self.src_device_obj).type == "cuda"
        kind: Literal["cpu", "cuda"] = "cuda" if on_gpus else "cpu"
        return resolve_devices(
            [Device(kind, operator.index(d)) if _is_number(d) else d for d in device_ids]
        )

    def _target(self, output_device: Any) -> Device | None:
        """Where to join outputs, None for host memory."""
        if output_device == -1:
            warnings.warn(
                "Using -1 to represent CPU tensor is deprecated. Please use a device object or "
                'string instead, e.g., "cpu".',
                FutureWarning,
                stacklevel=2,
            )
        elif output_device not in ("cpu", torch.device("cpu")):
            return self._devices([output_device])[0]
        on_host = cast(torch.device, self.src_device_obj).type == "cpu"
        return self._devices(self.device_ids[:1])[0] if on_host else None


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Iterable[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    dispatch: Dispatch = "auto",
) -> Any:
    """Calls a module on several devices, each with its share of the batch; see ``DataParallel``.

    Args:
        module: Its parameters and buffers must be on ``device_ids[0]``. It is never moved.
        inputs: A tuple of positional arguments, or the only one; None for none.
        device_ids: As for ``DataParallel``.
        output_device: As for ``DataParallel``.
        dim: As for ``DataParallel``.
        module_kwargs: Keyword arguments.
        dispatch: As for ``DataParallel``. What "auto" measures is kept for each module.

    Returns:
        The joined output on ``output_device``.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    wrapper: DataParallel[nn.Module] = DataParallel.__new__(DataParallel)
    nn.Module.__init__(wrapper)
    wrapper._configure(module, device_ids, output_device, dim)
    dispatchers = _dispatchers.setdefault(module, {})
    wrapper._dispatcher = dispatchers.setdefault(dispatch, Dispatcher(dispatch))
    return wrapper.forward(*inputs, **(module_kwargs or {}))


def _present_devices(device_ids: Iterable[DeviceLike] | None) -> list[Device]:
    """The devices, or none where GPUs are named on a machine without any."""
    if device_ids is None:
        return resolve_devices(None)
    named = list(device_ids)
    no_devices = not torch.cuda.is_available() and env.virtual_device_count() is None
    if no_devices and all(_is_number(d) or torch.device(str(d)).type == "cuda" for d in named):
        return []
    return resolve_devices(named)


def _is_number(device: object) -> bool:
    return hasattr(device, "__index__")
