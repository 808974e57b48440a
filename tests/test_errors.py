"""Errors of the user's: which object arrives, with what, and that the next step is right."""

import asyncio
import contextlib
import dataclasses
import gc
import traceback
import warnings
import weakref

import pytest
import torch
from notes import HAVE_NOTES, notes_of
from one_device import check_as_one_device
from torch import nn

import pyparallel
from pyparallel import env, workers
from pyparallel.gradient_bucket import GradientBucket

RANKS = 4


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every assignment, also that of a traceback."""

    code: int = 1


class Slots(Exception):
    __slots__ = ("code",)

    def __setattr__(self, name, value):
        raise AttributeError(name)


class Several(Exception):
    def __init__(self, code, text, *, where):
        super().__init__(code, text)
        self.where = where


class BadText(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class BadEquality(Exception):
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("not comparable")


class OwnNotes(Exception):
    __notes__ = ("not a list",)


ERRORS = {
    "ValueError": lambda: ValueError("bad"),
    "KeyError": lambda: KeyError("key"),
    "OSError": lambda: OSError(2, "no such file", "name"),
    "several arguments": lambda: Several(1, "text", where="here"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "reason"),
    "no text": BadText,
    "frozen": Frozen,
    "slots": Slots,
    "no equality": BadEquality,
    "own notes": OwnNotes,
    "StopIteration": lambda: StopIteration(3),
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "out of memory": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "warning": lambda: UserWarning("as an error"),
}
if HAVE_NOTES:
    ERRORS["group"] = lambda: ExceptionGroup("several", [ValueError(1), KeyError(2)])  # noqa: F821

errors = pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS.keys())


class Faults:
    """What ``Net`` raises: by rank, in forward or in backward."""

    def __init__(self):
        self.forward = {}
        self.backward = {}


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, faults, rank):
        ctx.faults, ctx.rank = faults, rank
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.rank in ctx.faults.backward:
            raise ctx.faults.backward[ctx.rank]
        return grad, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)
        self.faults = Faults()

    def forward(self, x):
        rank = int(x[0, 0])
        y = self.norm(self.first(x))
        if rank in self.faults.forward:
            raise self.faults.forward[rank]
        return self.second(Passing.apply(y, self.faults, rank))


def make_input():
    x = torch.randn(3 * RANKS, 4)
    x[:, 0] = torch.arange(3 * RANKS) // 3
    return x


def check(model):
    check_as_one_device(model, make_input())


@pytest.fixture(params=["sequential", "threads"])
def model(request, make_devices, monkeypatch):
    """A wrapper that has trained and been validated."""
    monkeypatch.setattr(workers, "cpu_count", lambda: 2)
    torch.manual_seed(0)
    wrapper = pyparallel.DataParallel(
        Net(), make_devices(RANKS), dispatch=request.param, bucket_cap_mb=1e-4
    )
    check(wrapper)
    return wrapper


def note(error, rank, model):
    return f"Caught {type(error).__name__} in replica {rank} on device {model.device_ids[rank]}."


@errors
def test_the_object_arrives_and_the_next_step_is_right(make, model):
    for grad in (True, False):
        error = make()
        model.module.faults.forward[2] = error
        with pytest.raises(type(error)) as caught, torch.set_grad_enabled(grad):
            model(make_input())
        assert caught.value is error
        if HAVE_NOTES:
            assert notes_of(error) == [note(error, 2, model)]
        trace = BaseException.__getattribute__(error, "__traceback__")
        code = list(traceback.walk_tb(trace))[-1][0].f_code
        assert (code.co_filename, code.co_name) == (__file__, "forward")
        model.module.faults.forward.clear()
        check(model)


@errors
def test_in_backward(make, model):
    error = make()
    model.module.faults.backward[2] = error
    with pytest.raises(type(error)) as caught:
        model(make_input()).sum().backward()
    assert caught.value is error
    model.module.faults.backward.clear()
    check(model)


def test_several_replicas_fail_at_once(model):
    for _ in range(3):
        raised = {rank: ValueError(rank) for rank in range(1, RANKS)}
        model.module.faults.forward.update(raised)
        with pytest.raises(ValueError) as caught:
            model(make_input())
        assert caught.value is raised[1]
    model.module.faults.forward.clear()
    check(model)


@pytest.mark.skipif(not HAVE_NOTES, reason="notes came with Python 3.11")
@pytest.mark.parametrize("make", [ValueError, Frozen])
def test_one_object_again_and_again_gets_one_note_for_each_replica(make, model):
    error = make()
    for ranks in ([1], [1], [3], [1, 2, 3]):
        model.module.faults.forward.update(dict.fromkeys(ranks, error))
        with pytest.raises(make):
            model(make_input())
        model.module.faults.forward.clear()
    assert set(notes_of(error)[:2]) == {note(error, rank, model) for rank in (1, 3)}
    assert len(notes_of(error)) <= 3


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("make", [ERRORS["out of memory"], Frozen])
def test_nothing_is_left_after_the_except_block(where, make, model):
    alive = []

    def remember(module, args, output):
        alive.append(weakref.ref(output))

    for module in (model.module.first, model.module.second):
        module.register_forward_hook(remember)
    check(model)
    alive.clear()
    getattr(model.module.faults, where)[2] = make()
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(Exception):
            model(make_input()).sum().backward()
        getattr(model.module.faults, where).clear()
        # The engine keeps nodes that did not run, in a queue of this thread, until it works again.
        torch.ones(1, requires_grad=True).backward()
        assert alive and not any(output() is not None for output in alive)
        assert gc.collect() == 0
    finally:
        gc.enable()
    check(model)


def test_activations_written_to_a_replica_that_failed_are_freed_before_the_next_one_runs(model):
    alive = []

    class Keeps(Net):
        def forward(self, x):
            assert self.faults.forward or not any(y() is not None for y in alive)
            self.kept = self.norm(self.first(x))
            if self.faults.forward:
                alive.append(weakref.ref(self.kept))
            return super().forward(x)

    model.module = Keeps()
    check(model)
    for _ in range(3):
        model.module.faults.forward[2] = ValueError("bad")
        with contextlib.suppress(ValueError):
            model(make_input())
        model.module.faults.forward.clear()
        assert alive
        model(make_input())
        alive.clear()
    check(model)


HOOKS = {
    "forward pre-hook": lambda m, hook: m.second.register_forward_pre_hook(hook),
    "forward hook": lambda m, hook: m.second.register_forward_hook(hook),
    "backward pre-hook": lambda m, hook: m.second.register_full_backward_pre_hook(hook),
    "backward hook": lambda m, hook: m.second.register_full_backward_hook(hook),
    "parameter hook": lambda m, hook: m.second.weight.register_hook(hook),
    "accumulation hook": lambda m, hook: m.second.weight.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS.keys())
def test_in_a_hook(register, model):
    error = Several(1, "hook", where="there")

    def hook(*args):
        raise error

    handle = register(model.module, hook)
    with pytest.raises(Several) as caught:
        model(make_input()).sum().backward()
    assert caught.value is error
    handle.remove()
    check(model)


@pytest.mark.parametrize("method", ["launch", "wait"])
def test_in_the_sum_of_a_bucket(method, model, monkeypatch):
    original = getattr(GradientBucket, method)
    calls = []

    def fail(self, *args):
        result = original(self, *args)
        calls.append(self)
        if len(calls) == 2:
            raise RuntimeError("the second sum fails")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(GradientBucket, method, fail)
        with pytest.raises(RuntimeError, match="the second sum fails"):
            model(make_input()).sum().backward()
    check(model)


@pytest.mark.filterwarnings("error")
def test_a_warning_as_an_error_in_gather(make_devices):
    class Mean(Net):
        def forward(self, x):
            return super().forward(x).mean() if self.training else super().forward(x)

    model = pyparallel.DataParallel(Mean(), make_devices(RANKS))
    for _ in range(2):
        with pytest.raises(UserWarning, match="all input tensors were scalars"):
            model(make_input())
        check(model)


def test_a_warning_as_an_error_in_a_replica(model):
    class Warns(Net):
        def forward(self, x):
            if self.training and int(x[0, 0]) == 2:
                warnings.warn("rank 2", stacklevel=1)
            return super().forward(x)

    model.module = Warns()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="rank 2") as caught:
            model(make_input())
    assert notes_of(caught.value) == [note(caught.value, 2, model)]
    check(model)


@pytest.mark.parametrize("method", ["scatter", "replicate", "parallel_apply", "gather"])
def test_in_an_own_step(method, make_devices):
    error = Frozen()

    class Own(pyparallel.DataParallel):
        fails = False

    def step(self, *args):
        if self.fails:
            raise error
        return getattr(super(Own, self), method)(*args)

    setattr(Own, method, step)
    model = Own(Net(), make_devices(RANKS))
    check(model)
    model.fails = True
    with pytest.raises(Frozen) as caught:
        model(make_input())
    assert caught.value is error
    assert notes_of(error) == []
    model.fails = False
    check(model)


def test_an_error_inside_no_sync(model):
    error = Frozen()
    x = make_input()
    with pytest.raises(Frozen) as caught, model.no_sync():
        raise error
    assert caught.value is error
    model(x).sum().backward()  # summed, since no_sync has ended
    assert not model._engine.content._accumulation._kept
    check(model)


def test_an_allocation_that_fails(model):
    class Greedy(Net):
        def forward(self, x):
            if self.training and int(x[0, 0]) == 1:
                torch.empty(2**60)
            return super().forward(x)

    model.module = Greedy()
    with pytest.raises(RuntimeError, match="allocate") as caught:
        model(make_input())
    assert notes_of(caught.value) == [note(caught.value, 1, model)]
    check(model)


@pytest.mark.skipif(not HAVE_NOTES, reason="notes came with Python 3.11")
def test_a_traceback_that_is_printed_has_torchs_words(model):
    model.module.faults.forward[3] = ValueError("bad")
    with pytest.raises(ValueError) as caught:
        model(make_input())
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert lines[-2:] == ["ValueError: bad", note(caught.value, 3, model)]


def test_operators_are_checked_while_errors_pass(model):
    """The tests run with PYPARALLEL_CHECK_DEVICES, whose mode must not stay in a thread."""
    assert env.check_devices()
    model.module.faults.forward[1] = Frozen()
    with pytest.raises(Frozen):
        model(make_input())
    assert torch._C._len_torch_dispatch_stack() == 0
