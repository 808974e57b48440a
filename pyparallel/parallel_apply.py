"""Running replicas side by side, and what comes back from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from pyparallel import env
from pyparallel.check_devices import MemoryOwners
from pyparallel.devices import Device
from pyparallel.dispatch import Dispatcher
from pyparallel.profiling import Steps


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]],
    devices: Sequence[Device],
    dispatcher: Dispatcher | None = None,
    steps: Steps | None = None,
) -> list[Any]:
    """Calls each module with its inputs on its device.

    Each call starts from the state of the calling thread (grad mode, autocast, the default device,
    context variables and so on, see ``CallerState``), and what it changes there is forgotten.
    Modules may wait for each other. All have ended when this returns or raises.

    Args:
        modules: One replica a rank.
        inputs: Per rank a list or tuple of positional arguments, or one argument of another type.
        kwargs_tup: Per rank the keyword arguments.
        devices: The device of each rank.
        dispatcher: Decides who runs when and in which thread. Default: a thread for each of several
            GPUs, which runs its ranks in turn; virtual devices, or one GPU, in turn in the calling
            thread.
        steps: Measures how long each rank takes.

    Returns:
        The outputs in the order of ranks.

    Raises:
        AssertionError: The arguments differ in length.
        BaseException: What a replica raised, with its traceback and a note that names the replica.
            Of several the one of the lowest rank, but an interrupt or exit first. A rank may not
            have started if a lower one had failed.
        KeyboardInterrupt: While workers ran replicas. Those that run are waited for, because they
            cannot be stopped; a second interrupt does not wait.
    """
    for what, values in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if len(modules) != len(values):
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to the number of {what} "
                f"{len(values)}"
            )
    if not modules:
        return []
    outputs: list[Any] = [None] * len(modules)
    errors: dict[int, BaseException] = {}

    checked: Callable[[int], AbstractContextManager[Any]] = nullcontext
    if devices[0].kind == "cpu" and env.check_devices():
        arguments = list(zip(inputs, kwargs_tup, strict=True))
        checked = MemoryOwners(modules, arguments, devices).checked

    def run(rank: int) -> None:
        args = inputs[rank] if isinstance(inputs[rank], (list, tuple)) else (inputs[rank],)
        measured = steps.rank(devices[rank]) if steps is not None else nullcontext()
        with _current_device(devices[rank]), checked(rank), measured:
            outputs[rank] = modules[rank](*args, **kwargs_tup[rank])

    def failed(rank: int, error: BaseException) -> None:
        _name_replica(error, rank, devices[rank])
        errors[rank] = error

    if dispatcher is None:
        several_gpus = len({device.torch_device for device in devices}) > 1
        dispatcher = Dispatcher("threads" if several_gpus else "sequential")
    dispatcher.run(run, failed, modules, (inputs[0], kwargs_tup[0]), devices)
    if errors:
        error = errors[min(errors, key=lambda rank: (isinstance(errors[rank], Exception), rank))]
        # The traceback holds this frame, which must not hold the traceback in turn.
        errors.clear()
        try:
            raise error
        finally:
            del error
    return outputs


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
