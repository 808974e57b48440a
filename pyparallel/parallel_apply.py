"""Running replicas side by side: one thread for each GPU, the ranks of one device in turn.

Ranks on one device draw from one random generator, and would draw in an order decided by timing if
they ran at once. So they run one after the other, in the order of ranks, which makes dropout
reproducible. All virtual devices are the CPU: their replicas run one after the other in the
caller's thread, each with all of torch's CPU threads. A replica that waits for another one on its
device therefore waits for ever; it may wait for replicas on other devices.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pyparallel.devices import Device


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]],
    devices: Sequence[Device],
) -> list[Any]:
    """Calls each module with its inputs on its device.

    With one device the modules run in the caller's thread. With several each device has a thread,
    which takes over from the caller: grad and inference mode, autocast, the default device, context
    variables, and the current stream of its device. All threads have ended when this returns or
    raises.

    Args:
        modules: One replica a rank.
        inputs: Per rank a list or tuple of positional arguments, or one argument of another type.
        kwargs_tup: Per rank the keyword arguments.
        devices: The device of each rank.

    Returns:
        The outputs in the order of ranks.

    Raises:
        AssertionError: The arguments differ in length.
        BaseException: What a replica raised, with its traceback and a note that names the replica.
            Of several the one of the lowest rank, but an interrupt or exit first. A rank does not
            start after an error on its device.
    """
    for what, values in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if len(modules) != len(values):
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to the number of {what} "
                f"{len(values)}"
            )
    outputs: list[Any] = [None] * len(modules)
    errors: dict[int, BaseException] = {}

    def run(ranks: Sequence[int]) -> None:
        for rank in ranks:
            args = inputs[rank] if isinstance(inputs[rank], (list, tuple)) else (inputs[rank],)
            try:
                with _current_device(devices[rank]):
                    outputs[rank] = modules[rank](*args, **kwargs_tup[rank])
            except BaseException as error:
                _name_replica(error, rank, devices[rank])
                errors[rank] = error
                return

    groups = _ranks_by_device(devices)
    if len(groups) == 1:
        run(groups[0])
    else:
        _run_in_threads(run, groups, [devices[ranks[0]] for ranks in groups])
    if errors:
        error = errors[min(errors, key=lambda rank: (isinstance(errors[rank], Exception), rank))]
        # The traceback holds this frame, which must not hold the traceback in turn.
        errors.clear()
        try:
            raise error
        finally:
            del error
    return outputs


def _ranks_by_device(devices: Sequence[Device]) -> list[list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for rank, device in enumerate(devices):
        groups.setdefault(device.torch_device, []).append(rank)
    return list(groups.values())


def _run_in_threads(
    run: Callable[[Sequence[int]], None],
    groups: Sequence[Sequence[int]],
    devices: Sequence[Device],
) -> None:
    """Calls ``run`` with each group in a new thread, in the caller's state; waits for all."""

    def work(ranks: Sequence[int], device: Device, state: _CallerState) -> None:
        with state.restored(device.torch_device):
            run(ranks)

    threads = []
    try:
        for ranks, device in zip(groups, devices, strict=True):
            # A context can be entered by one thread only, so each has a copy.
            arguments = (work, ranks, device, _CallerState.of_this_thread(device))
            thread = threading.Thread(target=contextvars.copy_context().run, args=arguments)
            thread.start()
            threads.append(thread)
    finally:
        _join(threads)


def _join(threads: Sequence[threading.Thread]) -> None:
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        # A replica cannot be stopped from outside. A second interrupt gives up waiting.
        for thread in threads:
            thread.join()
        raise


@dataclass(frozen=True)
class _CallerState:
    """What torch keeps for each thread and a replica expects as its caller left it."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    autocast_cache: bool
    default_device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def of_this_thread(cls, device: Device) -> "_CallerState":
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in sorted({"cpu", device.kind})
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            stream=torch.cuda.current_stream(device.index) if device.kind == "cuda" else None,
        )

    @contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            # After inference mode, which turns gradients off.
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache
                    )
                )
            if self.default_device.type != "cpu":
                # A default of the ranks' type stands for the replica's own device.
                own = device.type == self.default_device.type
                stack.enter_context(device if own else self.default_device)
            yield


@contextmanager
def _current_device(device: Device) -> Iterator[None]:
    if device.kind == "cuda":
        with torch.cuda.device(device.index):
            yield
    else:
        yield


def _name_replica(error: BaseException, rank: int, device: Device) -> None:
    note = f"Caught {type(error).__name__} in replica {rank} on device {device.index}."
    add_note = getattr(error, "add_note", None)
    if add_note is not None:
        # A program may raise one object again and again, and its class may do anything here:
        # neither may hide the error.
        with suppress(Exception):
            if note not in getattr(error, "__notes__", ()):
                add_note(note)
        return
    # Python 3.10 has no notes. The traceback also shows causes, so the note becomes the first
    # cause.
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        if cause.args == (note,) or any(cause is other for other in chain):
            return
        chain.append(cause)
    chain[-1].__cause__ = RuntimeError(note)
