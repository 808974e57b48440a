"""What torch and Python keep for each thread, carried from a caller to the threads that help it."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel.devices import Device

# Pairs of a getter and a setter in torch._C. They are private; a missing pair is not carried.
_SWITCHES = [
    (getattr(torch._C, getter), getattr(torch._C, setter))
    for getter, setter in (
        ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
        ("_is_multithreading_enabled", "_set_multithreading_enabled"),
        ("_is_view_replay_enabled", "_set_view_replay_enabled"),
    )
    if hasattr(torch._C, getter) and hasattr(torch._C, setter)
]
_AUTOCAST_KINDS = (
    torch._C._autocast_supported_devices()
    if hasattr(torch._C, "_autocast_supported_devices")
    else ["cpu", "cuda"]
)
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_HOOKS_CAN_BE_READ = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
_SMALLEST = 5e-324  # a subnormal number


class CallerState:
    """The state of the thread that makes it; ``run`` gives it to another thread.

    Carried: context variables, where torch keeps the compilers' configuration; grad and inference
    mode and the switches of autograd; autocast for every type of device; flushing of subnormal
    numbers; the stacks of torch-function and dispatch modes, which hold the default device; hooks
    for saved tensors; the current streams. Not carried, because torch gives Python no way: a
    profiler, and the transforms of ``torch.func``.

    Args:
        devices: The devices whose current streams are carried.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._switches = [get() for get, _ in _SWITCHES]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST_KINDS
        ]
        self._any_autocast = any(enabled for _, enabled, _ in self._autocast)
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._flush_denormal = _flushes_denormal()
        self._function_modes = function_modes()
        self._dispatch_modes = dispatch_modes()
        self._saved_tensors_hooks = saved_tensors_hooks()
        gpus = {d.index for d in devices if d.kind == "cuda"}
        self._streams = {i: torch.cuda.current_stream(i) for i in gpus}

    def run(self, device: Device, function: Callable[[], None]) -> None:
        """Calls ``function`` on ``device`` in a thread that has no state of its own.

        What it changes in the state is forgotten: the next call starts from the caller's again.
        """
        # A context can be entered once at a time, so each call has a copy.
        self._context.copy().run(self._run, device, function)

    def run_here(self, device: Device, function: Callable[[], None]) -> None:
        """Calls ``function`` on ``device`` in the thread whose state this is.

        What it changes in context variables, grad mode, autocast and the like is forgotten.
        """
        try:
            for mode in self._function_modes:
                if _on_own_device(mode, device) is not mode:
                    with device.torch_device:
                        return self._context.copy().run(function)
            self._context.copy().run(function)
        finally:
            self._set_switches()
            if self._any_autocast or _any_autocast():
                self._set_autocast()

    def _run(self, device: Device, function: Callable[[], None]) -> None:
        with ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            self._set_switches()  # after inference mode, which turns gradients off
            self._set_autocast()
            if self._any_autocast:
                # An autocast block inside function is then not the outermost one, at whose end
                # torch would empty the cache that all threads share.
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            if device.kind == "cuda":
                # The last stream entered decides about the current device.
                stack.enter_context(torch.cuda.stream(self._streams[device.index]))
            if self._saved_tensors_hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*self._saved_tensors_hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            stack.callback(_clear_modes)
            # Not by their __enter__, which users write and torch's does not expect in two threads.
            for function_mode in self._function_modes:
                torch._C._push_on_torch_function_stack(_on_own_device(function_mode, device))
            for dispatch_mode in self._dispatch_modes:
                torch._C._push_on_torch_dispatch_stack(dispatch_mode)
            function()

    def _set_switches(self) -> None:
        # Only what differs: modes of the user's may see these calls.
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
        for (get, set_switch), value in zip(_SWITCHES, self._switches, strict=True):
            if get() != value:
                set_switch(value)
        if _flushes_denormal() != self._flush_denormal:
            torch.set_flush_denormal(self._flush_denormal)

    def _set_autocast(self) -> None:
        for kind, enabled, dtype in self._autocast:
            if torch.is_autocast_enabled(kind) != enabled:
                torch.set_autocast_enabled(kind, enabled)
            if torch.get_autocast_dtype(kind) != dtype:
                torch.set_autocast_dtype(kind, dtype)
        if torch.is_autocast_cache_enabled() != self._autocast_cache:
            torch.set_autocast_cache_enabled(self._autocast_cache)


def function_modes() -> list[TorchFunctionMode]:
    """The calling thread's torch-function modes, the innermost last."""
    if not hasattr(torch._C, "_get_function_stack_at"):
        return []
    depth = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(depth)]


def dispatch_modes() -> list[TorchDispatchMode]:
    """The calling thread's dispatch modes, the innermost last."""
    if not hasattr(torch._C, "_get_dispatch_stack_at"):
        return []
    depth = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(i) for i in range(depth)]


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The calling thread's innermost hooks for saved tensors; torch 2.6 does not give them."""
    if not _HOOKS_CAN_BE_READ:
        return None
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _hooks_are_active() -> bool:
    """Whether the calling thread has hooks for saved tensors."""
    if _HOOKS_CAN_BE_READ:
        return saved_tensors_hooks() is not None
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    try:
        autograd._saved_tensors_hooks_disable("")  # refused where there are some
    except RuntimeError:
        return True
    finally:
        autograd._saved_tensors_hooks_enable()
    return False


def bound_to_thread(devices: Sequence[Device]) -> bool:
    """Whether something is going on that ends at the border of the calling thread.

    Hooks for saved tensors would work in another thread, but checkpointing matches tensors by the
    order in which they are saved, so ranks must run in order. The transforms of ``torch.func``,
    tracing by ``torch.jit`` and the capture of a CUDA graph do not reach another thread.
    """
    if _hooks_are_active() or torch._C._get_tracing_state() is not None:
        return True
    functorch = getattr(torch._C, "_functorch", None)
    if getattr(functorch, "maybe_current_level", lambda: None)() is not None:
        return True
    on_gpus = devices[0].kind == "cuda"
    return on_gpus and torch.cuda.is_current_stream_capturing()


def observed() -> bool:
    """Whether a mode or a profiler of the calling thread looks at every operator."""
    if any(not isinstance(mode, DeviceContext) for mode in function_modes()):
        return True
    return bool(dispatch_modes()) or torch._C._autograd._profiler_enabled()


def _on_own_device(mode: TorchFunctionMode, device: Device) -> TorchFunctionMode:
    """A default device of the ranks' type stands for each replica's own device."""
    if type(mode) is DeviceContext and mode.device.type == device.kind == "cuda":
        return DeviceContext(device.torch_device)
    return mode


def _clear_modes() -> None:
    for _ in function_modes():
        torch._C._pop_torch_function_stack()
    for mode in reversed(dispatch_modes()):
        torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))


def _flushes_denormal() -> bool:
    """Whether subnormal numbers count as zero here, which torch can set but not tell."""
    return _SMALLEST * 1.0 == 0.0
