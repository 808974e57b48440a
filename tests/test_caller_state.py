"""Replicas run in the state of their caller, whatever thread they run in."""

import contextlib
import contextvars
import decimal
import threading

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel import caller_state
from pyparallel.caller_state import (
    _HOOKS_CAN_BE_READ,
    CallerState,
    _on_own_device,
    bound_to_thread,
    observed,
    saved_tensors_hooks,
)
from pyparallel.devices import Device, resolve_devices, virtual_devices

VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")
DEVICES = resolve_devices(virtual_devices(2))


class CountFunctions(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class CountOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def flushes():
    smallest = torch.tensor([1e-40], device="cpu")
    return (smallest * 1.0).item() == 0.0


def state():
    return {
        "context variable": VARIABLE.get(),
        "decimal": decimal.getcontext().prec,
        "numpy": np.geterr(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward grad": torch._C._is_fwd_grad_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "view replay": torch._C._is_view_replay_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda", "xpu", "mps")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default device": torch.get_default_device(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks": saved_tensors_hooks(),
        "flush": flushes(),
        "matmul": torch.ones(2, 2, device="cpu").mm(torch.ones(2, 2, device="cpu")).dtype,
    }


def in_worker(function, twice=False):
    """Calls it in another thread in the state of this one."""
    carried = CallerState(DEVICES)
    results = []

    def call():
        results.append(function())

    def work():
        for _ in range(2 if twice else 1):
            carried.run(DEVICES[1], call)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results, "it raised"
    return results[-1]


@contextlib.contextmanager
def switch(name, value):
    before = getattr(torch._C, f"_is_{name}_enabled")()
    getattr(torch._C, f"_set_{name}_enabled")(value)
    yield
    getattr(torch._C, f"_set_{name}_enabled")(before)


@contextlib.contextmanager
def variable():
    token = VARIABLE.set("caller")
    yield
    VARIABLE.reset(token)


@contextlib.contextmanager
def flush_denormal():
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


CONTEXTS = {
    "nothing": contextlib.nullcontext,
    "context variable": variable,
    "decimal": lambda: decimal.localcontext(decimal.Context(prec=7)),
    "numpy": lambda: np.errstate(all="raise"),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "forward grad": lambda: switch("fwd_grad", False),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda: switch("view_replay", True),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "default device": lambda: torch.device("meta"),
    "function mode": CountFunctions,
    "dispatch mode": CountOperators,
    "hooks": hooks,
    "flush": flush_denormal,
}


@pytest.mark.behaviour(111, 112)
@pytest.mark.parametrize("name", CONTEXTS)
def test_everything_is_carried(name):
    if name == "hooks" and not _HOOKS_CAN_BE_READ:
        pytest.skip("this torch does not give them")
    nothing = state()
    with CONTEXTS[name]():
        expected = state()
        assert name == "nothing" or expected != nothing or name == "autocast off"
        assert in_worker(state) == expected
    assert state() == nothing


def test_several_at_once():
    with contextlib.ExitStack() as stack:
        for name in ("function mode", "dispatch mode", "default device", "numpy", "flush"):
            stack.enter_context(CONTEXTS[name]())
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(CONTEXTS["autocast float16"]())
        expected = state()
        assert expected["grad"] and expected["inference"]
        assert in_worker(state) == expected


@pytest.mark.behaviour(111, 112)
def test_autocast_of_another_type_of_device():
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert in_worker(state)["autocast"][1] == (True, torch.bfloat16)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_the_end_of_an_inner_autocast_keeps_the_cache():
    """It is common to all threads, and the caller's block has not ended."""

    def cached():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()

    assert in_worker(cached)[1] == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_worker(cached)[1] == 2


def test_modes_see_the_operators():
    with CountFunctions() as functions, CountOperators() as operators:
        in_worker(lambda: torch.ones(2, 2) + 1)
    assert functions.count >= 2 and operators.count >= 2


@pytest.mark.report("pytorch#186537")
def test_compiler_configuration():
    """Context variables hold it since torch 2.12, and new threads start from the default."""
    import torch._dynamo

    if not hasattr(torch._dynamo.config, "recompile_limit"):
        pytest.skip("this torch keeps it for the process")
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = 77
    try:
        assert in_worker(lambda: torch._dynamo.config.recompile_limit) == 77
    finally:
        torch._dynamo.config.recompile_limit = limit


def leak():
    """Changes everything and puts nothing back."""
    before = state()
    VARIABLE.set("replica")
    decimal.setcontext(decimal.Context(prec=5))
    torch.set_grad_enabled(not torch.is_grad_enabled())
    torch._C._set_fwd_grad_enabled(False)
    torch._C._set_multithreading_enabled(False)
    torch._C._set_view_replay_enabled(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.set_flush_denormal(True)
    return before


def test_what_a_rank_changes_is_forgotten():
    expected = state()
    assert in_worker(leak, twice=True) == expected
    carried = CallerState(DEVICES)
    seen = []
    for _ in range(2):
        carried.run_here(DEVICES[0], lambda: seen.append(leak()))
        assert state() == expected
    assert seen == [expected] * 2


def test_modes_that_a_rank_leaves_are_forgotten():
    def leave():
        depth = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        CountFunctions().__enter__()
        torch._C._push_on_torch_dispatch_stack(CountOperators())
        return depth

    with CountFunctions():
        assert in_worker(leave, twice=True) == (1, 0)


def test_an_error_leaves_the_thread_clean():
    def fail():
        raise ValueError("bad")

    def work():
        with contextlib.suppress(ValueError):
            carried.run(DEVICES[0], fail)
        after.append(state())

    after = []
    expected = state()
    with torch.inference_mode(), CountOperators(), CountFunctions(), hooks():
        carried = CallerState(DEVICES)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    for key in ("inference", "function modes", "dispatch modes", "hooks"):
        assert after[0][key] == expected[key]


@pytest.mark.parametrize("readable", [True, False])
def test_what_is_bound_to_the_thread(readable, monkeypatch):
    """Also where torch does not give the hooks."""
    monkeypatch.setattr(caller_state, "_HOOKS_CAN_BE_READ", readable and _HOOKS_CAN_BE_READ)
    assert not bound_to_thread(DEVICES)
    with hooks():
        assert bound_to_thread(DEVICES)
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    with torch.autograd.graph.disable_saved_tensors_hooks("off"):
        assert not bound_to_thread(DEVICES)
        assert not torch._C._autograd._saved_tensors_hooks_is_enabled()
    seen = []
    torch.func.vmap(lambda x: (seen.append(bound_to_thread(DEVICES)), x)[1])(torch.ones(2))
    torch.func.grad(lambda x: (seen.append(bound_to_thread(DEVICES)), x.sum())[1])(torch.ones(2))
    torch.jit.trace(
        lambda x: (seen.append(bound_to_thread(DEVICES)), x + 1)[1],
        torch.ones(2),
        check_trace=False,
    )
    assert len(seen) >= 3 and all(seen)
    assert not bound_to_thread(DEVICES)


@pytest.mark.parametrize(
    "context", [CountFunctions, CountOperators, lambda: torch.profiler.profile()]
)
def test_observed(context):
    with torch.device("meta"):
        assert not observed()
    with context():
        assert observed()
    assert not observed()


def test_a_default_device_of_the_ranks_type_is_each_rank_s_own():
    on_gpu_0 = DeviceContext("cuda:0")
    own = _on_own_device(on_gpu_0, Device("cuda", 1))
    assert own.device == torch.device("cuda:1") and on_gpu_0.device == torch.device("cuda:0")
    assert _on_own_device(on_gpu_0, Device("cpu", 1)) is on_gpu_0
    on_meta = DeviceContext("meta")
    assert _on_own_device(on_meta, Device("cuda", 1)) is on_meta


@pytest.mark.parametrize("here", [True, False])
def test_it_is_so_in_every_thread(here):
    seen = []
    with torch.device("cuda:0"):
        if torch.get_default_device() == torch.device("cpu"):
            pytest.skip("this torch does not tell the device of a with block")
        carried = CallerState([])
        carried._streams = {1: None}  # torch.cuda.stream(None) is nothing
        run = carried.run_here if here else carried.run
        call = (Device("cuda", 1), lambda: seen.append(torch.get_default_device()))
        if here:
            run(*call)
        else:
            thread = threading.Thread(target=run, args=call)
            thread.start()
            thread.join()
        assert torch.get_default_device() == torch.device("cuda:0")
    assert seen == [torch.device("cuda:1")]
