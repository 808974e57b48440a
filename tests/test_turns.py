"""Ranks take turns: order, failures, and ranks that wait. And what counts as waiting."""

import sys
import threading
import time
import types
import weakref

import pytest

from pyparallel import turns, watchdog, workers
from pyparallel.devices import resolve_devices, virtual_devices
from pyparallel.turns import Lane, take_turns


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def go(run, lanes, patience=60.0):
    """Returns how many ranks started because others waited, and the errors."""
    errors = {}
    count = sum(len(lane.ranks) for lane in lanes)
    devices = resolve_devices(virtual_devices(count))
    return take_turns(lanes, run, errors.__setitem__, devices, patience), errors


def in_caller(n):
    return [Lane(tuple(range(n)), 1, None, 1)]


def in_workers(n, width):
    return [Lane(tuple(range(n)), width, "cpu", 1)]


def two_devices():
    return [Lane((0, 2), 1, "cuda:0", 1), Lane((1, 3), 1, "cuda:1", 1)]


def with_caller(n, width):
    return [Lane(tuple(range(n)), width, "cpu", 1, with_caller=True)]


@pytest.mark.parametrize("lanes", [in_caller(4), in_workers(4, 1), with_caller(4, 1)])
def test_one_at_once_in_order(lanes):
    order = []
    assert go(order.append, lanes) == (0, {})
    assert order == [0, 1, 2, 3]


def test_each_lane_in_order():
    order = []
    for _ in range(20):
        order.clear()
        go(order.append, two_devices())
        assert order.index(0) < order.index(2) and order.index(1) < order.index(3)


def test_the_caller_is_one_of_those_who_run_ranks():
    barrier = threading.Barrier(3, timeout=60)
    idents = set()

    def run(rank):
        idents.add(threading.get_ident())
        barrier.wait()

    assert go(run, with_caller(6, 3)) == (0, {})
    assert len(idents) == 3 and threading.get_ident() in idents


def test_after_an_interrupt_of_the_caller_no_ranks_start():
    started = []
    caller_is_through = threading.Event()

    def run(rank):
        started.append(rank)
        if threading.current_thread() is threading.main_thread():
            while len(started) < 2:
                time.sleep(0.001)
            raise KeyboardInterrupt
        caller_is_through.wait(0.2)

    _, errors = go(run, with_caller(6, 2))
    assert sorted(started) == [0, 1]
    assert [type(error) for error in errors.values()] == [KeyboardInterrupt]


def test_a_quick_lane_does_not_end_the_call():
    """The first may be through before the second has started."""
    for _ in range(50):
        ran = []
        go(ran.append, [Lane((rank,), 1, f"kind {rank}", 1) for rank in range(4)])
        assert sorted(ran) == [0, 1, 2, 3]


@pytest.mark.parametrize("lanes", [in_caller(4), in_workers(4, 1)])
def test_after_a_failure_no_higher_rank_starts(lanes):
    ran = []

    def run(rank):
        ran.append(rank)
        if rank == 1:
            raise KeyError(rank)

    _, errors = go(run, lanes)
    assert ran == [0, 1] and list(errors) == [1]


def test_after_a_failure_those_start_for_whom_others_may_wait():
    met = threading.Barrier(2, timeout=60)

    def run(rank):
        if rank == 1:
            raise KeyError(rank)
        if rank in (0, 3):
            met.wait()

    _, errors = go(run, two_devices())
    assert list(errors) == [1]


def test_lower_ranks_run_whatever_failed():
    """So that the error of the lowest rank does not depend on timing."""

    def run(rank):
        time.sleep(0.02 * (3 - rank))
        raise KeyError(rank)

    for lanes in (two_devices(), in_workers(4, 2), in_workers(4, 4)):
        _, errors = go(run, lanes)
        assert 0 in errors


@pytest.mark.parametrize("lanes", [in_caller(2), in_workers(2, 1)])
def test_an_error_around_the_rank_is_the_ranks(lanes, monkeypatch):
    """It must not end the worker, or the caller would wait for ever."""

    def fail(*_):
        raise RuntimeError("no such stream")

    monkeypatch.setattr(turns.CallerState, "run", fail)
    monkeypatch.setattr(turns.CallerState, "run_here", fail)
    _, errors = go(lambda rank: None, lanes)
    assert str(errors[0]) == "no such stream"
    monkeypatch.undo()
    assert go(lambda rank: None, lanes) == (0, {})


def test_no_worker_can_be_started(monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "submit", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        go(lambda rank: None, in_workers(2, 2))


def test_nothing_is_held_afterwards():
    """Not even for the moment in which the watchdog looks."""

    class Marker:
        pass

    def holding(marker):
        return lambda rank: seen.extend([marker, *watchdog._alive()][1:])

    marker = Marker()
    held = weakref.ref(marker)
    seen = []
    run = holding(marker)
    go(run, in_workers(2, 2))
    assert len(set(map(id, seen))) == 1 and not watchdog._watched
    del run, marker
    assert held() is None


# ---- waiting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [in_caller(4), in_workers(4, 1), in_workers(4, 2), two_devices()])
def test_ranks_that_wait_for_each_other(lanes):
    barrier = threading.Barrier(4, timeout=60)
    names = []

    def run(rank):
        barrier.wait()
        names.append(threading.current_thread().name)

    extra, errors = go(run, lanes, patience=0.05)
    assert not errors
    assert extra == 4 - sum(lane.width for lane in lanes)
    assert len(names) == 4


def test_ranks_that_wait_for_a_lower_one_need_nothing():
    done = [threading.Event() for _ in range(4)]

    def run(rank):
        if rank:
            assert done[rank - 1].wait(60)
        done[rank].set()

    assert go(run, in_caller(4), patience=0.05) == (0, {})


@pytest.mark.parametrize("lanes", [in_caller(2), in_workers(2, 1)])
def test_work_is_no_waiting(lanes):
    """However long it takes: ranks that draw random numbers keep their order."""
    order = []

    def run(rank):
        spin(0.5)
        order.append(rank)

    assert go(run, lanes, patience=0.15) == (0, {})
    assert order == [0, 1]


def test_nested_work_is_no_waiting():
    def inner(rank):
        spin(0.5)

    extra = []

    def outer(rank):
        extra.append(go(inner, in_workers(2, 2), patience=0.2)[0])

    assert go(outer, in_workers(2, 1), patience=0.2) == (0, {})
    assert extra == [0, 0]


def test_nested_waiting_is_waiting():
    barrier = threading.Barrier(4, timeout=60)

    def outer(rank):
        _, errors = go(lambda _: barrier.wait(), in_workers(2, 2), patience=0.05)
        assert not errors

    assert go(outer, in_workers(2, 1), patience=0.05) == (1, {})


def test_sitting_in_a_debugger_is_no_waiting():
    """The next rank would ask for commands too."""
    bdb = types.ModuleType("bdb")
    exec("import time\ndef interact():\n    time.sleep(0.4)", bdb.__dict__)
    assert go(lambda rank: bdb.interact(), in_caller(2), patience=0.1) == (0, {})
    assert go(lambda rank: time.sleep(0.4), in_caller(2), patience=0.1)[0] == 1


def test_patience_is_short_once_a_rank_had_to_wait():
    barrier = threading.Barrier(4, timeout=60)
    start = time.monotonic()
    assert go(lambda rank: barrier.wait(), in_caller(4), patience=0.8) == (3, {})
    assert 0.8 < time.monotonic() - start < 2.2


# ---- the watchdog --------------------------------------------------------------------------------


class Looked:
    patience = 0.05

    def __init__(self, action=lambda: None):
        self.count = 0
        self.action = action

    def look(self):
        self.count += 1
        self.action()


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_looks_again_and_again_and_survives_errors(caplog):
    def fail():
        raise RuntimeError("in look")

    looked, failing = Looked(), Looked(fail)
    watchdog.watch(failing)
    watchdog.watch(looked)
    wait_for(lambda: looked.count > 3 and failing.count > 3)
    watchdog.unwatch(looked)
    watchdog.unwatch(failing)
    assert "in look" in caplog.text
    time.sleep(0.1)
    count = looked.count
    time.sleep(0.1)
    assert looked.count == count


def test_it_sleeps_when_there_is_nothing_and_wakes_up(monkeypatch):
    monkeypatch.setattr(watchdog, "_IDLE_LOOKS", 2)
    for _ in range(3):
        looked = Looked()
        watchdog.watch(looked)
        wait_for(lambda looked=looked: looked.count > 1)
        watchdog.unwatch(looked)
        wait_for(lambda: not watchdog._awake.is_set())


@pytest.mark.parametrize("name", ["unwatch", "waits_no_more"])
def test_an_interrupt_may_keep_a_call_from_taking_its_entry_out(name, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(watchdog, "_IDLE_LOOKS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            go(lambda rank: time.sleep(0.05), in_workers(2, 2))
    wait_for(lambda: not watchdog._awake.is_set() and not watchdog._watched)
    # Nor does the thread that was interrupted seem to work for ever.
    barrier = threading.Barrier(2, timeout=60)
    assert go(lambda rank: barrier.wait(), in_caller(2), patience=0.05) == (1, {})


def test_progress_without_a_clock(monkeypatch):
    """Then only time counts."""
    monkeypatch.setattr(watchdog, "_cpu_time", lambda _: None)
    progress = watchdog.Progress()
    spin(0.05)
    assert progress.idle_seconds() >= 0.05


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of threads")
def test_progress():
    made, end = [], threading.Event()

    def work():
        made.append(watchdog.Progress())
        spin(0.2)
        made.append("waits")
        end.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: made)
    while len(made) == 1:
        assert made[0].idle_seconds() < 0.1
        time.sleep(0.01)
    time.sleep(0.05)
    made[0].idle_seconds()
    time.sleep(0.1)
    assert made[0].idle_seconds() >= 0.1
    end.set()
    thread.join()
    wait_for(lambda: made[0].idle_seconds() > 0.05)  # a thread that ended does not work
