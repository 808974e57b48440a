"""Running replicas side by side, and what comes back from them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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
    kwargs_tup: Sequence[dict[str, Any]] | None,
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
        kwargs_tup: Per rank the keyword arguments; None for none.
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
    if kwargs_tup is None:
        kwargs_tup = [{} for _ in modules]
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
        device = devices[rank]
        on_gpu = torch.cuda.device(device.index) if device.kind == "cuda" else nullcontext()
        with on_gpu, checked(rank), measured:
            outputs[rank] = modules[rank](*args, **kwargs_tup[rank])

    def failed(rank: int, error: BaseException) -> None:
        errors[rank] = error
        _name_replica(error, rank, devices[rank])

    if dispatcher is None:
        several_gpus = len({device.torch_device for device in devices}) > 1
        dispatcher = Dispatcher("threads" if several_gpus else "sequential")
    dispatcher.run(run, failed, modules, (inputs[0], kwargs_tup[0]), devices)
    if errors:
        # Not isinstance, which asks an exception for its class.
        error = errors[min(errors, key=lambda r: (issubclass(type(errors[r]), Exception), r))]
        # The traceback holds this frame, which must not hold the traceback in turn.
        errors.clear()
        try:
            raise error
        finally:
            del error
    return outputs


def _name_replica(error: BaseException, rank: int, device: Device) -> None:
    """Says in a note where an error comes from, in torch's words."""
    # A program may raise one object again and again, and its class may do anything here: neither
    # may hide the error.
    with suppress(Exception):
        note = f"Caught {type(error).__name__} in replica {rank} on device {device.index}."
        add_note = getattr(error, "add_note", None)
        if add_note is None:
            _add_first_cause(error, note)
        else:
            _add_note(error, note, add_note)


def _add_note(error: BaseException, note: str, add_note: Callable[[str], None]) -> None:
    with suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            add_note(note)
        return
    # The class refuses assignments, for instance as a frozen dataclass.
    notes = object.__getattribute__(error, "__dict__").setdefault("__notes__", [])
    if note not in notes:
        notes.append(note)


def _add_first_cause(error: BaseException, note: str) -> None:
    """Where there are no notes, on Python 3.10, tracebacks show at least causes."""
    chain = [error]
    while (cause := _cause(chain[-1])) is not None:
        if cause.args == (note,) or any(cause is other for other in chain):
            return
        chain.append(cause)
    chain[-1].__cause__ = RuntimeError(note)


def _cause(error: BaseException) -> BaseException | None:
    """What a traceback shows above the error."""
    if error.__cause__ is None and not error.__suppress_context__:
        return error.__context__
    return error.__cause__
