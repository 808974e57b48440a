"""The wrapper: its constructor, and forward with its four steps."""

import functools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel.data_parallel import _check_balance

from pyparallel import env
from pyparallel.arguments import with_own_modules
from pyparallel.chunk_sizes import Split, check_split
from pyparallel.devices import (
    Device,
    DeviceLike,
    check_exists,
    device_list,
    host_if_minus_1,
    parse_device,
    resolve_devices,
)
from pyparallel.dispatch import Dispatch, Dispatcher
from pyparallel.engine import Engine, check_module_device
from pyparallel.parallel_apply import parallel_apply
from pyparallel.profiling import Steps
from pyparallel.replicate import replicate
from pyparallel.scatter_gather import gather, scatter_kwargs
from pyparallel.shells import PerObject

T = TypeVar("T", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


def _untraced(method: F) -> F:
    """Keeps torch.compile out of a step that works on the objects themselves, not on tensors."""
    untraced: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if not untraced:
                # Not at import: it imports dynamo, which takes seconds. And only once: torch 2.6
                # compiles what comes after it again for each function that it has made.
                untraced.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
            return untraced[0](*args, **kwargs)
        return method(*args, **kwargs)

    return cast(F, step)


class DataParallel(nn.DataParallel[T]):
    """Runs a module on several devices, each with its share of the batch.

    A drop-in for ``torch.nn.DataParallel``. Each forward splits the inputs (see ``scatter``),
    runs a replica of the module on every device, and joins their outputs on ``output_device``.
    Backward sums the gradients of all replicas into the parameters of ``module``, bucket by
    bucket, while it still runs.

    ``module`` stays the only owner of the weights: optimizers, checkpoints (keys begin with
    ``module.``) and any other code use it as without the wrapper, and each forward sees all
    changes. Replicas persist between forwards, and only what changed is sent to them. In-place
    writes to buffers, such as BatchNorm's statistics, stay if made on the first device; other
    changes that forward makes to its replica are forgotten.

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
        split: "chunk" cuts batches as torch does: 9 rows on 4 devices make 3 + 3 + 3. "balanced"
            makes 3 + 2 + 2 + 2: sizes differ by at most one, and a device is left out only if
            there are fewer rows than devices.
        bucket_cap_mb: How many MiB of gradients are summed in one operation. Default: 25, and 1 for
            the first one.
        resend: "auto" sends only the tensors that changed, "always" all of them at each forward.
        dispatch: "threads" runs the copies at once, "sequential" one after the other, "auto" the
            way that it measures to be faster; see ``Dispatcher``.

    Attributes:
        module: The wrapped module.
        device_ids: Indices of the devices, as ints.
        output_device: An int, or ``torch.device("cpu")`` for host memory; None without devices.
        src_device_obj: The device of the module's tensors; for virtual devices
            ``torch.device("cpu")``, which has no index; None without devices.
        dim: As given.
        split: As given.

    Raises:
        ValueError: A device that does not exist, GPUs mixed with virtual devices, more than 16
            devices, or an unknown ``dispatch`` or ``split``.
        RuntimeError: A negative index. From forward: a parameter or buffer is not on
            ``device_ids[0]``.

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
        split: Split = "chunk",
        bucket_cap_mb: float | None = None,
        resend: Literal["auto", "always"] = "auto",
        dispatch: Dispatch = "auto",
    ) -> None:
        is_size = isinstance(bucket_cap_mb, Real) and bucket_cap_mb > 0
        if bucket_cap_mb is not None and not is_size:
            raise ValueError(
                f"bucket_cap_mb must be a number greater than 0, but is {bucket_cap_mb!r}"
            )
        if resend not in ("auto", "always"):
            raise ValueError(f"resend must be 'auto' or 'always', but is {resend!r}")
        # Not torch's constructor, which knows no virtual devices.
        nn.Module.__init__(self)
        self._configure(module, device_ids, output_device, dim, split)
        self.bucket_cap_mb = bucket_cap_mb
        self.resend = resend
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
        split: Split,
    ) -> None:
        check_split(split)
        devices = _present_devices(device_ids)
        self.module = module
        self.dim = dim
        self.split = split
        self._steps = Steps(f"DataParallel({type(module).__name__})")
        self._engine = PerObject()
        self._stats_base = PerObject()
        self.device_ids = [device.index for device in devices]
        self.output_device = None
        self.src_device_obj = devices[0].torch_device if devices else None
        if devices:
            self.output_device = self.device_ids[0]
            if output_device == -1:
                self.output_device = -1  # gather warns of it
            elif output_device is not None:
                target = self._target(output_device)
                if target is not None:
                    _check_output_device(target, devices)
                self.output_device = torch.device("cpu") if target is None else target.index

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module on all devices."""
        if torch.compiler.is_compiling():
            return self._forward(inputs, kwargs)
        with self._steps.forward():
            return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        if len(self.device_ids) == 1:
            args, module_kwargs = self._only_share(inputs, kwargs)
            return self.module(*args, **module_kwargs)
        return self._run_all(inputs, kwargs)

    @_untraced
    def _only_share(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._check_module()
        args, module_kwargs = self._shares(inputs, kwargs)
        return args[0], module_kwargs[0]

    # One untraced step: torch.compile would compile what lies between two of them again and again.
    @_untraced
    def _run_all(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self._run_replicas(*self._shares(inputs, kwargs))
        with self._steps.part("gather"):
            return self.gather(outputs, self.output_device)

    def _shares(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], Sequence[dict[str, Any]]]:
        with self._steps.part("scatter"):
            args, module_kwargs = self.scatter(inputs, kwargs, self.device_ids)
        if not args and not module_kwargs:
            # Without any input the module runs once.
            return ((),), ({},)
        return args, module_kwargs

    def _run_replicas(self, inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> list[Any]:
        with self._steps.part("replicate"):
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        try:
            inputs, kwargs = with_own_modules(self.module, replicas, inputs, kwargs)
            with self._steps.part("parallel_apply"):
                return self.parallel_apply(replicas, inputs, kwargs)
        finally:
            del inputs, kwargs
            engine = self._engine.content
            if engine is not None:
                engine.release(replicas)

    @_untraced
    def replicate(self, module: T, device_ids: Sequence[Any]) -> list[T]:
        """Returns a copy of ``module`` for each device; without gradients if they are off.

        Copies of the wrapped module persist: when the last reference to all modules of a copy is
        gone, the next call may return it again.
        """
        count = len(device_ids)
        if module is self.module and list(device_ids) == self.device_ids[:count]:
            return cast(list[T], self._get_engine().replicas(count))
        return replicate(module, self._devices(device_ids), not torch.is_grad_enabled())

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward leaves the gradients on their devices.

        The next backward outside sums them together with its own, so that several small batches
        cost one transfer. What counts is where backward runs. Meanwhile ``parameter.grad`` is the
        first device's part; setting it to None or to zeros, as ``zero_grad`` does, forgets all
        parts. A parameter that the backward outside does not reach gets the others' parts when that
        ends, without hooks. ``torch.autograd.grad`` and gradients that are themselves recorded are
        always summed.
        """
        if len(self.device_ids) < 2:
            return nullcontext()
        return self._get_engine().no_sync()

    def transfer_stats(self, reset: bool = False) -> dict[str, int]:
        """Returns how much of the module went to the devices.

        Args:
            reset: Count from zero afterwards.

        Returns:
            Since construction or the last reset, over all devices: ``bytes_sent``, and
            ``bytes_skipped``, which were there already. Gradients, inputs and outputs do not count.
        """
        engine = self._engine.content
        sent, skipped = (0, 0) if engine is None else engine.transferred()
        base_sent, base_skipped = self._stats_base.content or (0, 0)
        if reset:
            self._stats_base.content = (sent, skipped)
        return {"bytes_sent": sent - base_sent, "bytes_skipped": skipped - base_skipped}

    @_untraced
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Returns positional and keyword arguments of each device; see ``scatter_kwargs``."""
        return scatter_kwargs(inputs, kwargs, self._devices(device_ids), self.dim, self.split)

    @_untraced
    def parallel_apply(
        self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Returns what each replica makes of its arguments; see ``parallel_apply``."""
        devices = self._devices(self.device_ids[: len(replicas)])
        outputs = parallel_apply(replicas, inputs, kwargs, devices, self._dispatcher, self._steps)
        if self._engine.content is not None:
            self._engine.content.check_not_modified(replicas[0])
        return outputs

    @_untraced
    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the outputs of the replicas."""
        devices = self._devices(self.device_ids[: len(outputs)])
        return gather(outputs, devices, self._target(output_device), self.dim)

    def _get_engine(self) -> Engine:
        engine: Engine | None = self._engine.content
        # Users may assign module and devices. Another process has none of our threads, and its
        # devices are not ours.
        if (
            engine is None
            or engine.module is not self.module
            or engine.device_ids != self.device_ids
            or engine.pid != os.getpid()
        ):
            cap = self.bucket_cap_mb
            engine = Engine(
                self.module,
                self._devices(self.device_ids),
                bucket_bytes=None if cap is None else int(cap * 2**20),
                always_send=self.resend == "always",
            )
            self._engine.content = engine
            self._stats_base.content = None
        return engine

    def _check_module(self) -> None:
        check_module_device(self.module, cast(torch.device, self.src_device_obj))

    def _devices(self, device_ids: Iterable[Any]) -> list[Device]:
        """An int is a device of this wrapper's kind, whatever the environment says by now."""
        on_gpus = cast(torch.device, self.src_device_obj).type == "cuda"
        kind: Literal["cpu", "cuda"] = "cuda" if on_gpus else "cpu"
        named = tuple(device_ids)
        try:
            if all(type(d) is int for d in named):  # as they are unless the user assigned others
                return list(_numbered(kind, named))
            return resolve_devices(
                [Device(kind, operator.index(d)) if _is_number(d) else d for d in named]
            )
        except ValueError as error:
            if on_gpus and max(self.device_ids) >= torch.cuda.device_count():
                raise ValueError(
                    f"{error}. This wrapper was made for the GPUs {self.device_ids}: make another "
                    "one, around its .module"
                ) from None
            raise

    def _target(self, output_device: Any) -> Device | None:
        """Where to join outputs, None for host memory."""
        kind = cast(torch.device, self.src_device_obj).type
        # None is the current GPU, as in torch.
        output_device = kind if output_device is None else host_if_minus_1(output_device)
        if output_device not in ("cpu", torch.device("cpu")):
            return self._devices([output_device])[0]
        return self._devices(self.device_ids[:1])[0] if kind == "cpu" else None


def _present_devices(device_ids: Iterable[DeviceLike] | None) -> list[Device]:
    """The devices, or none where GPUs are named on a machine without any."""
    if device_ids is None:
        return resolve_devices(None)
    named = device_list(device_ids)
    no_devices = not torch.cuda.is_available() and env.virtual_device_count() is None
    if no_devices and all(parse_device(d, "cuda")[0] == "cuda" for d in named):
        return []
    return resolve_devices(named)


def _check_output_device(target: Device, devices: Sequence[Device]) -> None:
    resolve_devices([devices[0], target])  # refuses a GPU among virtual devices
    count = max(device.index + 1 for device in devices)
    check_exists(target, max(count, env.virtual_device_count() or 0))


@functools.lru_cache(maxsize=256)
def _numbered(kind: Literal["cpu", "cuda"], numbers: tuple[int, ...]) -> tuple[Device, ...]:
    return tuple(resolve_devices([Device(kind, number) for number in numbers]))


def _is_number(device: object) -> bool:
    return hasattr(device, "__index__")
