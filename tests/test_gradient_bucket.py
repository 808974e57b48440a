"""Sums of a bucket: what is launched, who waits for what."""

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from pyparallel.accumulation import Accumulation
from pyparallel.communicator import get_communicator
from pyparallel.devices import resolve_devices
from pyparallel.gradient_bucket import GradientBucket


@pytest.fixture
def bucket_of(make_devices):
    def make(parameters, n=3):
        communicator = get_communicator(resolve_devices(make_devices(n)))
        return GradientBucket(communicator, parameters, Accumulation(communicator))

    return make


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_sums_are_there_after_wait(dtype, size, bucket_of):
    parameters = [torch.zeros(size, dtype=dtype), torch.zeros(2, 3, dtype=dtype).t()]
    bucket = bucket_of(parameters)
    grads = [torch.full_like(p, 2.0**rank) for rank in range(3) for p in parameters]
    sums = bucket.launch(grads)
    del grads  # what is still read is kept
    bucket.wait()
    for total, parameter in zip(sums, parameters, strict=True):
        assert torch.equal(total, torch.full_like(parameter, 7))
        assert total.stride() == parameter.stride()
    bucket.wait()


def test_absent_gradients(bucket_of):
    parameters = [torch.zeros(2), torch.zeros(0), torch.zeros(3), torch.zeros(50_000)]
    bucket = bucket_of(parameters)
    one, two = (torch.full((50_000,), value) for value in (1.0, 2.0))
    empty = torch.zeros(0)
    sums = bucket.launch(
        [None, empty, None, one, torch.ones(2), None, None, None, torch.ones(2), None, None, two]
    )
    bucket.wait()
    assert sums[0].tolist() == [2, 2] and sums[1].shape == (0,) and sums[2] is None
    assert torch.equal(sums[3], one + two)
    assert bucket.launch([None] * 12) == [None] * 4


def test_gradients_in_other_layouts(bucket_of):
    weight = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    bucket = bucket_of([weight], 2)
    grad = torch.randn(2, 3, 4, 4)
    (total,) = bucket.launch([grad, weight + 1])
    bucket.wait()
    assert torch.equal(total, grad + 1) and total.stride() == weight.stride()
    real = bucket_of([torch.zeros(3)], 2)
    negative = torch.randn(3, dtype=torch.complex64).conj().imag  # a lazy negation
    (total,) = real.launch([negative, torch.zeros(3)])
    real.wait()
    assert negative.is_neg() and torch.equal(total, negative.resolve_neg())


def test_other_dtypes_and_sparse_gradients(bucket_of):
    weight = torch.zeros(4)
    grad = torch.eye(4).to_sparse()[0]
    (total,) = bucket_of([weight], 2).launch([grad, grad])
    assert total.is_sparse and total.to_dense().tolist() == [2, 0, 0, 0]
    small = torch.ones(3).to(torch.float8_e4m3fn)
    (total,) = bucket_of([small], 2).launch([small, small])
    assert total.float().tolist() == [2, 2, 2]


def test_a_thread_waits_for_sums_that_another_one_waits_for(bucket_of):
    bucket = bucket_of([torch.zeros(100)])
    entered, done, finished = threading.Event(), threading.Event(), []

    def slow_wait(ticket):
        entered.set()
        assert done.wait(10)
        finished.append(ticket)

    core = SimpleNamespace(wait=slow_wait, reduce_add=lambda *args, **kwargs: 5)
    devices = bucket.communicator.devices
    bucket.communicator = SimpleNamespace(core=core, devices=devices)
    bucket.launch([torch.zeros(100)] * 3)
    first = threading.Thread(target=bucket.wait)
    first.start()
    assert entered.wait(10)
    seen = []
    second = threading.Thread(target=lambda: (bucket.wait(), seen.append(list(finished))))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    done.set()
    first.join()
    second.join()
    assert seen == [[5]]


def test_a_sum_that_failed_is_reported_once(bucket_of):
    bucket = bucket_of([torch.zeros(100)])

    def fail(ticket):
        raise RuntimeError("rank 1 did not arrive")

    core = SimpleNamespace(wait=fail, reduce_add=lambda *args, **kwargs: 5)
    devices = bucket.communicator.devices
    bucket.communicator = SimpleNamespace(core=core, devices=devices)
    bucket.launch([torch.zeros(100)] * 3)
    with pytest.raises(RuntimeError, match="rank 1 did not arrive"):
        bucket.wait()
    bucket.wait()


class Core:
    """A core whose sums never end before somebody waits for them."""

    def __init__(self):
        self.needed = []
        self.waits = []

    def reduce_add(self, *args, asynchronous):
        return 5

    def wait(self, ticket):
        assert all(needed() is not None for needed in self.needed)
        self.waits.append(ticket)


def launched(bucket_of, core):
    bucket = bucket_of([torch.zeros(100)])
    bucket.communicator = SimpleNamespace(core=core, devices=bucket.communicator.devices)
    grads = [torch.zeros(100) for _ in range(3)]
    core.needed = [weakref.ref(grad) for grad in grads]
    bucket.launch(grads)
    return bucket


def test_a_bucket_that_is_dropped_keeps_what_its_sums_need(bucket_of):
    """As after an error in backward, whose gates wait for nothing."""
    core = Core()
    bucket = launched(bucket_of, core)
    assert all(needed() is not None for needed in core.needed)
    del bucket
    assert core.waits == [5]
    assert not any(needed() is not None for needed in core.needed)


class Late(Core):
    def wait(self, ticket):
        super().wait(ticket)
        if len(self.waits) < 3:
            raise RuntimeError("wait: no queued sum was finished for 40 ms")


def test_a_late_sum_keeps_what_it_needs_until_a_later_one_is_done(bucket_of):
    core = Late()
    bucket = launched(bucket_of, core)
    late = core.needed
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no queued sum"):
            bucket.wait()
        assert all(needed() is not None for needed in late)
        core.needed = []
        bucket.launch([torch.zeros(100)] * 3)
    bucket.wait()
    assert not any(needed() is not None for needed in late)


def test_a_bucket_that_is_dropped_with_a_late_sum_frees_nothing(bucket_of, monkeypatch):
    lost = []
    monkeypatch.setattr("pyparallel.gradient_bucket._lost", lost)
    core = Late()
    bucket = launched(bucket_of, core)
    del bucket
    assert core.waits == [5] and len(lost) == 1
    assert all(needed() is not None for needed in core.needed)


def test_sums_of_the_parent_are_none_of_a_forked_childs(bucket_of):
    bucket = launched(bucket_of, Core())
    bucket.communicator.core = child = Core()
    bucket.launch([torch.zeros(100)] * 3)
    bucket.wait()
    assert child.waits == [5] and not bucket._running


def test_an_interrupt_that_arrives_with_the_ticket(bucket_of):
    class Interrupted(Core):
        def reduce_add(self, *args, asynchronous):
            raise KeyboardInterrupt

        def synchronize(self):
            self.wait(0)

    core = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        launched(bucket_of, core)
    assert core.waits == [0]
