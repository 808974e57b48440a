"""Outputs, exceptions, the state that replicas see, order of ranks, whichever way they run."""

import contextlib
import contextvars
import gc
import threading
import time
import warnings

import pytest
import torch
from notes import notes_of
from torch import nn
from torch._utils import ExceptionWrapper

from pyparallel.devices import resolve_devices, virtual_devices
from pyparallel.dispatch import Dispatcher
from pyparallel.parallel_apply import parallel_apply

VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.fixture(params=["sequential", "threads", "auto"])
def dispatch(request):
    return request.param


def apply(functions, inputs=None, kwargs=None, dispatch=None):
    n = len(functions)
    return parallel_apply(
        [Call(function) for function in functions],
        inputs or [()] * n,
        kwargs or [{}] * n,
        resolve_devices(virtual_devices(n)),
        Dispatcher(dispatch) if dispatch else None,
    )


@pytest.mark.behaviour(108, 139)
def test_outputs_are_in_the_order_of_ranks(dispatch):
    inputs = [(1,), [2], 3, torch.tensor(4)]
    kwargs = [{"add": 10 * rank} for rank in range(4)]
    assert apply([lambda x, add: x + add] * 4, inputs, kwargs, dispatch) == [1, 12, 23, 34]


@pytest.mark.behaviour(110)
def test_ranks_of_one_device_run_in_order_in_the_callers_thread():
    log = []
    apply([lambda rank=rank: log.append((rank, threading.get_ident())) for rank in range(4)])
    assert log == [(rank, threading.get_ident()) for rank in range(4)]


def test_replicas_that_wait_for_each_other_do_not_hang(dispatch):
    """Also where nothing was said about dispatch, and with fewer threads than ranks."""
    for chosen in (dispatch, None):
        barrier = threading.Barrier(4, timeout=60)
        apply([barrier.wait] * 4, dispatch=chosen)


def test_no_replicas(dispatch):
    assert apply([], dispatch=dispatch) == []


def state():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        VARIABLE.get(),
        torch.empty(0).dtype,
    )


@pytest.mark.behaviour(111, 112, 113)
@pytest.mark.parametrize(
    "context",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
)
def test_replicas_see_the_callers_state(dispatch, context):
    token = VARIABLE.set("caller")
    try:
        with context():
            expected = state()
            assert apply([state] * 3, dispatch=dispatch) == [expected] * 3
    finally:
        VARIABLE.reset(token)


@pytest.mark.behaviour(112)
def test_gradients_inside_inference_mode_stay_as_the_caller_has_them(dispatch):
    with torch.inference_mode(), torch.enable_grad():
        expected = state()
        assert expected[0] and apply([state] * 2, dispatch=dispatch) == [expected] * 2


@pytest.mark.behaviour(112)
def test_default_device_is_handed_over(dispatch):
    with torch.device("meta"):
        kinds = apply([lambda: torch.empty(2).device.type] * 2, dispatch=dispatch)
        assert kinds == ["meta", "meta"]


def test_the_callers_state_and_thread_counts_stay_as_they_were(dispatch):
    count = torch.get_num_threads()
    apply([lambda: torch.ones(64, 64) @ torch.ones(64, 64)] * 4, dispatch=dispatch)
    assert torch.get_num_threads() == count
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [count]
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@pytest.mark.behaviour(113)
def test_dropout_is_reproducible():
    def draw():
        torch.manual_seed(3)
        return torch.cat(apply([lambda: torch.nn.functional.dropout(torch.ones(100))] * 4))

    first = draw()
    assert all(torch.equal(draw(), first) for _ in range(3))


GLOBALS = {
    "default dtype": (
        torch.get_default_dtype,
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "anomaly": (
        torch.is_anomaly_enabled,
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "precision": (
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "attention": (
        torch.backends.cuda.flash_sdp_enabled,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
    "warnings": (
        lambda: [entry[0] for entry in warnings.filters if "a test" in str(entry[1])],
        lambda: warnings.filterwarnings("error", "a test"),
        warnings.resetwarnings,
    ),
}


@pytest.mark.behaviour(113)
@pytest.mark.parametrize("name", GLOBALS)
def test_what_is_common_to_the_process_counts_in_replicas(dispatch, name):
    get, change, back = GLOBALS[name]
    before = get()
    with warnings.catch_warnings():
        try:
            change()
            assert get() != before and apply([get] * 3, dispatch=dispatch) == [get()] * 3
        finally:
            back()


@pytest.mark.cuda
@pytest.mark.behaviour(111, 112, 168, 183, 184)
def test_replicas_have_their_device_and_the_callers_streams(dispatch, make_devices):
    devices = resolve_devices(make_devices(2))
    streams = {d.index: torch.cuda.Stream(d.index) for d in devices}

    def look():
        current = torch.cuda.current_device()
        return current, torch.cuda.current_stream(), torch.empty(0, device="cuda").device.index

    current = torch.cuda.current_device()
    with contextlib.ExitStack() as stack:
        for stream in streams.values():
            stack.enter_context(torch.cuda.stream(stream))
        torch.cuda.set_device(current)
        modules = [Call(look) for _ in devices]
        seen = parallel_apply(modules, [()] * 2, None, devices, Dispatcher(dispatch))
    assert seen == [(d.index, streams[d.index], d.index) for d in devices]
    assert torch.cuda.current_device() == current


@pytest.mark.behaviour(119)
def test_a_device_may_be_there_twice(dispatch):
    devices = resolve_devices(["cpu:1", "cpu:1"])
    modules = [Call(lambda x: x + 1)] * 2
    assert parallel_apply(modules, [1, 2], None, devices, Dispatcher(dispatch)) == [2, 3]
    with pytest.raises(ValueError) as caught:
        parallel_apply(
            [Call(lambda: 1), Call(raising(ValueError()))], [()] * 2, None, devices, None
        )
    assert notes_of(caught.value) == ["Caught ValueError in replica 1 on device 1."]


class TwoArguments(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)


def raising(error):
    def forward():
        raise error

    return forward


@pytest.mark.report(
    "pytorch#51382",
    "pytorch#34130",
    "pytorch#30147",
    "pytorch#44631",
    "pytorch#11633",
    "pytorch#18055",
)
@pytest.mark.behaviour(114, 115)
@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("bad"),
        lambda: KeyError("key"),
        lambda: TwoArguments(3, "x"),
        lambda: StopIteration(),
    ],
)
def test_the_users_exception_arrives_as_it_is(dispatch, make):
    error = make()
    with pytest.raises(type(error)) as caught:
        apply([lambda: 1, raising(error), raising(RuntimeError("later"))], dispatch=dispatch)
    assert caught.value is error
    assert error.args == make().args
    assert notes_of(error) == [f"Caught {type(error).__name__} in replica 1 on device 1."]
    assert any(entry.name == "forward" for entry in caught.traceback)
    assert apply([lambda: 1] * 3, dispatch=dispatch) == [1, 1, 1]


@pytest.mark.behaviour(114)
def test_the_note_is_the_first_line_of_torchs_text():
    with pytest.raises(ValueError) as ours:
        apply([lambda: 1, raising(ValueError("bad"))])
    with pytest.raises(ValueError) as theirs:
        try:
            raise ValueError("bad")
        except ValueError:
            ExceptionWrapper(where="in replica 1 on device 1").reraise()
    assert notes_of(ours.value) == [str(theirs.value).split("\n")[0]]


@pytest.mark.behaviour(114)
def test_the_lowest_rank_wins(dispatch):
    def slowly():
        time.sleep(0.05)
        raise ValueError("first")

    for _ in range(5):
        with pytest.raises(ValueError, match="first"):
            apply([slowly, raising(KeyError("second")), lambda: 1], dispatch=dispatch)


def test_no_reference_cycles(dispatch):
    def fail():
        raise ValueError("bad")

    gc.collect()
    gc.disable()
    try:
        apply([lambda: 1] * 3, dispatch=dispatch)
        assert gc.collect() == 0
        with contextlib.suppress(ValueError):
            apply([lambda: 1, fail], dispatch=dispatch)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.behaviour(116)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exits_and_interrupts_come_first(dispatch, kind):
    with pytest.raises(kind):
        apply([lambda: 1, raising(kind()), lambda: 2], dispatch=dispatch)
    barrier = threading.Barrier(2, timeout=60)

    def fail(error):
        def forward():
            barrier.wait()
            raise error

        return forward

    with pytest.raises(kind):
        apply([fail(ValueError("lower rank")), fail(kind())], dispatch=dispatch)


def test_a_cause_names_the_replica_where_exceptions_have_no_notes():
    class Old(Exception):
        add_note = None

    inner = ValueError("inner")
    error = Old("outer")
    error.__cause__ = inner
    with pytest.raises(Old) as caught:
        apply([raising(error)])
    assert caught.value.__cause__ is inner
    assert str(inner.__cause__) == "Caught Old in replica 0 on device 0."


def test_an_exception_raised_again_gets_no_second_note():
    class Old(Exception):
        add_note = None

    for error in (ValueError("once"), Old("once")):
        for _ in range(3):
            with pytest.raises(type(error)):
                apply([raising(error)])
    with pytest.raises(ValueError) as caught:
        apply([lambda: 1, raising(again := ValueError("once"))])
    assert caught.value is again
    with pytest.raises(ValueError):
        apply([raising(again)])
    assert notes_of(again) == [f"Caught ValueError in replica {r} on device {r}." for r in (1, 0)]
    assert error.__cause__.args == ("Caught Old in replica 0 on device 0.",)
    assert error.__cause__.__cause__ is None


def test_causes_in_a_circle_end():
    class Old(Exception):
        add_note = None

    error, other = Old(), Old()
    error.__cause__, other.__cause__ = other, error
    with pytest.raises(Old):
        apply([raising(error)])
    error.__cause__ = None


def test_a_note_that_cannot_be_added_hides_nothing():
    class Closed(Exception):
        def add_note(self, note):
            raise TypeError("no notes here")

    error = Closed("bad")
    with pytest.raises(Closed) as caught:
        apply([raising(error)])
    assert caught.value is error
