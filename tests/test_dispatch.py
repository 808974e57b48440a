"""Which way ranks run: as asked, or as measured, and never so that results depend on it."""

import copy
import pickle
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyparallel
from pyparallel import timing, virtual_devices, workers
from pyparallel.devices import Device, resolve_devices
from pyparallel.dispatch import Dispatcher
from pyparallel.one_forward import _dispatchers
from pyparallel.parallel_apply import parallel_apply

WAYS = ["sequential", "threads", "auto"]
ENOUGH = 17  # calls until "auto" has measured


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch):
    monkeypatch.setattr(workers, "cpu_count", lambda: 2)


@pytest.fixture
def threads_win(monkeypatch):
    """Whatever the clock says, "auto" finds threads faster."""
    monkeypatch.setattr(timing, "_HYSTERESIS", 1e9)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.function(self, x)


def wrap(function, n=4, dispatch="auto"):
    return pyparallel.DataParallel(Call(function), virtual_devices(n), dispatch=dispatch)


def who(module, x):
    """Which thread: 0 is the caller's."""
    ident = threading.get_ident()
    return x.new_full((len(x),), 0 if ident == threading.main_thread().ident else ident % 2**40)


def threads_used(dp, x=None, calls=1):
    """The threads of the last call."""
    for _ in range(calls):
        result = dp(torch.ones(8, 4, dtype=torch.float64) if x is None else x)
    return set(result.tolist())


def test_values_that_are_refused():
    for make in (
        lambda: pyparallel.DataParallel(nn.Linear(1, 1), virtual_devices(2), dispatch="baton"),
        lambda: pyparallel.data_parallel(nn.Linear(1, 1), None, virtual_devices(2), dispatch=""),
        lambda: Dispatcher("Auto"),
    ):
        with pytest.raises(ValueError, match="dispatch must be one of auto, threads, sequential"):
            make()


@pytest.mark.behaviour(110)
def test_sequential_is_the_callers_thread():
    assert threads_used(wrap(who, dispatch="sequential")) == {0}
    order = []
    wrap(lambda m, x: (order.append(x[0, 0].item()), x)[1], dispatch="sequential")(
        torch.arange(8.0).reshape(4, 2)
    )
    assert order == [0, 2, 4, 6]


@pytest.mark.behaviour(110)
def test_threads_are_as_many_as_cpus():
    barrier = threading.Barrier(2, timeout=60)

    def meet(module, x):
        barrier.wait()
        return who(module, x)

    used = threads_used(wrap(meet, dispatch="threads"))
    assert len(used) == 2 and 0 not in used


@pytest.mark.parametrize("count", [1, 4])
def test_the_caller_takes_part_if_it_has_the_threads_of_a_worker(count, threads_win):
    barrier = threading.Barrier(2, timeout=60)

    def meet(module, x):
        if dp._dispatcher._timings and next(iter(dp._dispatcher._timings.values())).decided:
            barrier.wait()
        return who(module, x)

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        dp = wrap(meet)
        used = threads_used(dp, calls=ENOUGH + 1)
    finally:
        torch.set_num_threads(before)
    # Two workers have half the caller's threads each, but at least one.
    assert len(used) == 2 and (0 in used) == (count == 1)


@pytest.mark.parametrize("dispatch", WAYS)
def test_the_function(dispatch):
    module = nn.Linear(4, 4)
    x = torch.randn(8, 4)
    for _ in range(ENOUGH):
        out = pyparallel.data_parallel(module, x, virtual_devices(2), dispatch=dispatch)
        torch.testing.assert_close(out, module(x))


def test_the_function_remembers_what_it_measured(threads_win):
    module = Call(who)
    x = torch.ones(8, 4, dtype=torch.float64)
    for _ in range(ENOUGH):
        pyparallel.data_parallel(module, x, virtual_devices(4))
    (measured,) = _dispatchers[module]["auto"]._timings.values()
    assert measured.decided and measured.next_way() == "threads"


def test_copies_of_a_wrapper_measure_anew(threads_win):
    dp = pyparallel.DataParallel(nn.Linear(4, 4), virtual_devices(2), dispatch="auto")
    for _ in range(ENOUGH):
        dp(torch.ones(4, 4))
    for other in (copy.deepcopy(dp), pickle.loads(pickle.dumps(dp))):
        assert other._dispatcher.dispatch == "auto" and not other._dispatcher._timings
        torch.testing.assert_close(other(torch.ones(4, 4)), dp(torch.ones(4, 4)))


# ---- what must not depend on timing --------------------------------------------------------------


def late(x):
    """Lets the first rank come after the others, if it does not run before them."""
    if x.flatten()[0] == 0:
        time.sleep(0.005)


def dropout(module, x):
    late(x)
    return torch.nn.functional.dropout(module.linear(x))


def python_noise(module, x):
    late(x)
    return (x + 1) * random.random()


def numpy_noise(module, x):
    late(x)
    return (x + 1) * np.random.rand()


def sometimes(module, x):
    """Draws only when it is told to."""
    return dropout(module, x) if module.function.draw else module.linear(x)


@pytest.mark.behaviour(113)
@pytest.mark.parametrize("draw", [dropout, python_noise, numpy_noise])
@pytest.mark.parametrize("train", [True, False])
def test_shared_generators_are_used_in_order(draw, train, threads_win):
    """Ranks that draw at once would get other numbers each time."""
    dp = wrap(draw).train(train)
    x = torch.arange(256.0).reshape(64, 4)

    def seeded():
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        return dp(x)

    first = seeded()
    assert all(torch.equal(seeded(), first) for _ in range(3 * ENOUGH))
    # Threads are what it would have chosen.
    other = wrap(who)
    threads_used(other, calls=ENOUGH)
    (measured,) = other._dispatcher._timings.values()
    assert measured.decided and measured.next_way() == "threads"


def test_a_model_that_starts_to_draw(threads_win):
    sometimes.draw = False
    dp = wrap(sometimes)
    for _ in range(ENOUGH):
        dp(torch.ones(8, 4))
    sometimes.draw = True
    dp(torch.ones(8, 4))  # the one call in which nobody could know

    def seeded():
        torch.manual_seed(0)
        return dp(torch.ones(8, 4))

    first = seeded()
    assert all(torch.equal(seeded(), first) for _ in range(ENOUGH))


def test_dropout_layers_are_known_from_the_first_call():
    dp = pyparallel.DataParallel(
        nn.Sequential(nn.Dropout(0.5), Call(who)), virtual_devices(4), dispatch="auto"
    )
    assert threads_used(dp) == {0}
    dp.eval()(torch.ones(8, 4))
    training, evaluating = dp._dispatcher._timings.values()
    assert training.may_draw and not evaluating.may_draw


def test_sums_do_not_depend_on_the_way(threads_win):
    """Torch adds in another order with another number of threads."""
    count = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        x = torch.randn(4, 1_000_003)
        dp = wrap(lambda module, x: x.sum().reshape(1))
        first = dp(x)
        assert all(torch.equal(dp(x), first) for _ in range(ENOUGH))
        torch.set_num_threads(3)  # the share of 6 on two CPUs
        assert torch.equal(torch.stack([row.sum() for row in x]), first)
    finally:
        torch.set_num_threads(count)


@pytest.mark.parametrize("dispatch", WAYS)
def test_checkpoint_around_the_wrapper(dispatch, threads_win):
    """Forward and recomputation save tensors in the same order, in the thread with the hooks."""

    def forward(module, x):
        calls.append(1)
        # In forward the first rank would be late, in recomputation the second.
        if x[0, 0] == (0 if len(calls) <= 2 else 4):
            time.sleep(0.02)
        return torch.tanh(module.linear(x))

    calls = []
    dp = wrap(forward, 2, dispatch)
    x = torch.arange(8.0).reshape(2, 4)
    for _ in range(ENOUGH):
        dp(x)
    parameters = list(dp.module.linear.parameters())
    weights = torch.tensor([[1.0], [3.0]])  # or a mistaken rank would do for the other
    y = torch.tanh(dp.module.linear(x))
    expected = torch.autograd.grad((weights * y).sum(), parameters)
    for _ in range(3):
        calls.clear()
        y = checkpoint(dp, x, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad((weights * y).sum(), parameters), expected)


@pytest.mark.behaviour(112)
@pytest.mark.parametrize("dispatch", WAYS)
def test_hooks_for_saved_tensors_see_the_replicas(dispatch):
    packed = []
    dp = wrap(lambda module, x: torch.tanh(module.linear(x)), dispatch=dispatch)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t)[1], lambda t: t):
        dp(torch.randn(8, 4)).sum().backward()
    assert len(packed) >= 4


@pytest.mark.parametrize("dispatch", WAYS)
def test_transforms(dispatch):
    """They are known to the calling thread only."""
    modules = [Call(lambda module, x: torch.tanh(module.linear(x))) for _ in range(2)]
    devices = resolve_devices(virtual_devices(2))

    def total(x):
        return sum(parallel_apply(modules, [x, x], [{}, {}], devices, Dispatcher(dispatch))).sum()

    x = torch.randn(8, 4)
    expected = torch.autograd.functional.jacobian(total, x)
    torch.testing.assert_close(torch.func.grad(total)(x), expected)


@pytest.mark.behaviour(112)
def test_a_profiler_sees_all_operators(threads_win):
    dp = wrap(lambda module, x: torch.tanh(x))
    for _ in range(ENOUGH):
        dp(torch.ones(8, 4))
    with torch.profiler.profile() as profile:
        dp(torch.ones(8, 4))
    assert sum(event.name == "aten::tanh" for event in profile.events()) >= 4


# ---- compiled code -------------------------------------------------------------------------------


@pytest.mark.report("pytorch#118260", "pytorch#136833", "pytorch#168042")
@pytest.mark.parametrize("dispatch", ["threads", "auto"])
@pytest.mark.parametrize("how", ["torch.compile", "Module.compile", "function", "torch.jit"])
def test_new_shapes_of_compiled_code_run_one_after_the_other(dispatch, how, threads_win):
    running, most = [], []

    def forward(module, x):
        running.append(1)
        most.append(len(running))
        y = x
        for _ in range(200):
            y = torch.tanh(y)
        running.pop()
        return y

    module = Call(forward)
    if how == "torch.compile":
        module.linear = torch.compile(module.linear, backend="eager")
    elif how == "Module.compile":
        module.linear.compile(backend="eager")
    elif how == "function":
        module.compiled = torch.compile(torch.tanh, backend="eager")
    else:
        module.linear = torch.jit.script(module.linear)
    dp = pyparallel.DataParallel(module, virtual_devices(4), dispatch=dispatch)
    for rows in (8, 12, 16):
        most.clear()
        dp(torch.ones(rows, 4))
        assert max(most) == 1
        for _ in range(ENOUGH):
            dp(torch.ones(rows, 4))
    assert dp._dispatcher._needs_compilation(dp.module, torch.ones(5, 4))
    assert not dp._dispatcher._needs_compilation(dp.module, torch.ones(5, 4))


# ---- waiting for each other ----------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", WAYS)
@pytest.mark.parametrize("hooks", [False, True])
def test_ranks_that_wait_for_each_other(dispatch, hooks):
    barrier = threading.Barrier(5, timeout=100)

    def meet(module, x):
        barrier.wait()
        return module.linear(x)

    dp = wrap(meet, n=5, dispatch=dispatch)
    x = torch.randn(10, 4)
    context = torch.autograd.graph.saved_tensors_hooks if hooks else lambda *_: torch.enable_grad()
    with context(lambda t: t, lambda t: t):
        for _ in range(3):
            torch.testing.assert_close(dp(x), dp.module.linear(x))


def test_ranks_that_wait_get_a_thread_each():
    barrier = threading.Barrier(4, timeout=60)
    dp = wrap(lambda module, x: (barrier.wait(), who(module, x))[1], dispatch="threads")
    for _ in range(3):
        threads_used(dp)
    assert len(threads_used(dp)) == 4
    assert dp._dispatcher._ranks_wait


# ---- lanes ---------------------------------------------------------------------------------------


def test_each_gpu_has_one_worker_that_runs_its_ranks_in_turn():
    devices = [Device("cuda", index) for index in (0, 1, 0, 1, 2)]
    lanes = Dispatcher("threads")._at_once(devices)
    assert [(lane.ranks, lane.width, lane.workers) for lane in lanes] == [
        ((0, 2), 1, "cuda:0"),
        ((1, 3), 1, "cuda:1"),
        ((4,), 1, "cuda:2"),
    ]
    assert all(lane.share == max(1, torch.get_num_threads() // 3) for lane in lanes)


# ---- timing --------------------------------------------------------------------------------------


def test_classes():
    """One for each grad mode, training mode and power of two of the size."""
    dp = wrap(lambda module, x: module.linear(x))
    timings = dp._dispatcher._timings
    for rows, classes in ((8, 1), (12, 1), (16, 2), (28, 2), (4, 3)):
        dp(torch.ones(rows, 4))
        assert len(timings) == classes
    with torch.no_grad():
        dp(torch.ones(8, 4))
    dp.eval()(torch.ones(8, 4))
    dp.train()(torch.ones(8, 4))
    assert len(timings) == 5


def test_the_number_of_classes_is_bounded(monkeypatch):
    monkeypatch.setattr(pyparallel.dispatch, "_MAX_CLASSES", 3)
    dp = wrap(lambda module, x: module.linear(x))
    for exponent in range(6):
        dp(torch.ones(2**exponent * 4, 4))
    assert len(dp._dispatcher._timings) == 3
