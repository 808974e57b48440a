"""Ranks that are absent, late or wrong, as a user meets them: a RuntimeError, and then it works."""

import re
import threading

import pytest
import torch

from pyparallel import _C, core
from pyparallel.communicator import Communicator
from pyparallel.devices import resolve_devices, virtual_devices

TIMEOUT_MS = 300
# More slices than connections have slots, so that every rank is waited for.
COUNT = 1_000_000


@pytest.fixture
def faulty(monkeypatch):
    """Makes a communicator of three virtual devices whose rank 1 fails in its first launches."""
    opened = []

    def make(fault, **options):
        options = {"timeout_ms": TIMEOUT_MS, **options}
        monkeypatch.setattr(core, "_open", lambda _: _C.faulty_communicator(3, 1, fault, **options))
        opened.append(Communicator(resolve_devices(virtual_devices(3))))
        return opened[-1]

    yield make
    for communicator in opened:
        communicator.close()


def broadcast(communicator):
    """Runs a chain from rank 0; returns the source and every rank's result."""
    source = torch.randn(COUNT)
    return source, [row[0] for row in communicator.broadcast([source], algorithm="chain")]


@pytest.mark.report(
    "pytorch#52142", "pytorch#24081", "pytorch#7019", "nccl#257", "DeepSpeed#4433", "pytorch#85334"
)
@pytest.mark.parametrize("fault", ["absent", "wrong"])
def test_the_call_that_waits_raises_and_the_next_one_is_right(faulty, fault):
    communicator = faulty(fault)
    with pytest.raises(RuntimeError) as raised:
        broadcast(communicator)
    assert re.fullmatch(
        rf"chain broadcast: rank \d waited {TIMEOUT_MS} ms for (data|a credit) from rank \d on "
        r"channel \d: wanted step \d+, saw \d+",
        str(raised.value),
    )
    for _ in range(3):
        source, results = broadcast(communicator)
        assert all(torch.equal(result, source) for result in results)


def test_a_late_rank_is_reported_by_the_next_call_whatever_it_is(faulty):
    communicator = faulty("late", late_ms=200)
    kept = broadcast(communicator)  # the late rank still uses this memory
    with pytest.raises(RuntimeError, match="^chain broadcast: rank "):
        communicator.all_reduce([torch.ones(8) for _ in range(3)])
    # It runs to its end on connections that nobody else uses any more.
    for _ in range(5):
        source, results = broadcast(communicator)
        assert all(torch.equal(result, source) for result in results)
    communicator.close()
    assert len(kept[1]) == 3


def test_a_failure_in_one_thread_leaves_other_threads_right(faulty):
    communicator = faulty("absent", launches=2)
    raised = []

    def work():
        for _ in range(4):
            try:
                source, results = broadcast(communicator)
            except RuntimeError as error:
                raised.append(str(error))
            else:
                assert all(torch.equal(result, source) for result in results)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(raised) == 2
    assert all(text.startswith("chain broadcast: rank ") for text in raised)


@pytest.mark.report("pytorch#119262", "pytorch#180701")
def test_python_runs_while_a_call_waits(faulty):
    communicator = faulty("absent")
    ticks, over = [], threading.Event()

    def tick():
        while not over.wait(0.01):
            ticks.append(1)

    ticker = threading.Thread(target=tick)
    ticker.start()
    with pytest.raises(RuntimeError, match="^chain broadcast: "):
        broadcast(communicator)
    over.set()
    ticker.join()
    assert len(ticks) >= 5, "the call held the interpreter lock"


def test_unknown_faults_are_refused():
    with pytest.raises(ValueError, match="a fault is absent, late or wrong, not 'slow'"):
        _C.faulty_communicator(2, 0, "slow")
