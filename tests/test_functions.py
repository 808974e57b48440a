"""Autograd functions: values, first and second derivatives, absent gradients, order in backward."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from pyparallel import bucket, functions
from pyparallel.communicator import get_communicator
from pyparallel.data_parallel import DataParallel
from pyparallel.devices import resolve_devices
from pyparallel.functions import Broadcast, Gather, ReduceAdd, Scatter
from pyparallel.gradient_bucket import GradientBucket

pytestmark = pytest.mark.usefixtures("on_the_first_device")

DTYPES = [torch.float64, torch.complex128]


@pytest.fixture
def communicator(make_devices):
    return lambda nranks: get_communicator(resolve_devices(make_devices(nranks)))


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def check(function, inputs):
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.behaviour(54)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_broadcast_is_twice_differentiable(nranks, dtype, communicator):
    comm = communicator(nranks)
    check(lambda *ts: Broadcast.apply(comm, *ts), (leaf(3, 2, dtype=dtype), leaf(dtype=dtype)))


@pytest.mark.behaviour(54)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_reduce_add_is_twice_differentiable(nranks, dtype, communicator):
    comm = communicator(nranks)
    terms = tuple(leaf(*shape, dtype=dtype) for _ in range(nranks) for shape in [(3,), (2, 2)])
    check(lambda *ts: ReduceAdd.apply(comm, 2, *ts), terms)


@pytest.mark.behaviour(54)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("nranks, sizes", [(1, [5]), (2, [3, 2]), (4, [2, 0, 3]), (3, [5, 0, 0])])
def test_scatter_and_gather_are_twice_differentiable(nranks, sizes, dim, dtype, communicator):
    comm = communicator(nranks)
    shape = [2, 2, 2]
    shape[dim] = 5
    check(lambda t: Scatter.apply(comm, 0, sizes, dim, t), (leaf(*shape, dtype=dtype),))
    pieces = []
    for size in sizes:
        shape[dim] = size
        pieces.append(leaf(*shape, dtype=dtype))
    check(lambda *ts: Gather.apply(comm, 0, dim, *ts), tuple(pieces))


@pytest.mark.behaviour(59)
def test_broadcast_shares_the_roots_memory_and_its_version_counter(communicator):
    weight = leaf(4)
    rows = functions.broadcast(communicator(3), [weight])
    assert rows[0][0].data_ptr() == weight.data_ptr()
    assert len({row[0].data_ptr() for row in rows}) == 3
    result = (rows[0][0] ** 2).sum()
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_a_written_original_leaves_the_copies_readable(communicator):
    weight = leaf(4)
    root = functions.broadcast(communicator(2), [weight])[0][0]
    with torch.no_grad():
        weight.zero_()
    assert root.grad_fn is not None
    assert torch.equal(root, torch.zeros(4, dtype=torch.float64))


def test_a_gradient_that_some_ranks_lack_is_the_sum_of_the_others(communicator):
    first, second, third = leaf(3), leaf(3), leaf(3)
    rows = functions.broadcast(communicator(3), [first, second, third])
    # Rank 0 has no gradient of the second tensor, and nobody has one of the third.
    (
        rows[0][0].sum() + 2 * rows[2][0].sum() + 4 * rows[1][1].sum() + 8 * rows[2][1].sum()
    ).backward()
    assert torch.equal(first.grad, torch.full((3,), 3.0, dtype=torch.float64))
    assert torch.equal(second.grad, torch.full((3,), 12.0, dtype=torch.float64))
    assert third.grad is None


def test_absent_gradients_stay_absent_in_double_backward(communicator):
    first, second = leaf(3), leaf(3)
    rows = functions.broadcast(communicator(2), [first, second])
    loss = (rows[1][0] ** 3).sum()
    (grad,) = torch.autograd.grad(loss, [first], create_graph=True)
    assert torch.allclose(grad, 3 * first**2)
    grad.sum().backward()
    assert torch.allclose(first.grad, 6 * first)
    assert second.grad is None


@pytest.mark.behaviour(53)
def test_a_piece_without_gradient_counts_as_zeros(communicator):
    x = leaf(5, 2)
    pieces = Scatter.apply(communicator(2), 0, [3, 2], 0, x)
    pieces[1].sum().backward()
    expected = torch.tensor([0, 0, 0, 1, 1], dtype=torch.float64)
    assert torch.equal(x.grad, expected[:, None].expand(5, 2))


@pytest.mark.report("yolov5#5218")
def test_gradients_keep_the_layout_of_the_parameter_and_are_not_copied(monkeypatch, communicator):
    comm = communicator(2)
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    sums = []
    reduce_add = comm.reduce_add

    def recording(inputs, **options):
        result = reduce_add(inputs, **options)
        sums.extend(tensor.data_ptr() for tensor in result)
        return result

    monkeypatch.setattr(comm, "reduce_add", recording)
    rows = functions.broadcast(comm, [weight])
    assert rows[1][0].is_contiguous(memory_format=torch.channels_last)
    sum((row[0] ** 2).sum() for row in rows).backward()
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight.grad, 4 * weight)
    assert sums == [weight.grad.data_ptr()]


class Chain(nn.Module):
    """Layers whose gradients report to a log when they arrive."""

    def __init__(self, log):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))
        self.log = log

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x.register_hook(lambda grad, i=i: self.log.append(f"layer {i}"))
        return x


@pytest.mark.behaviour(101)
def test_sums_start_while_backward_still_runs(monkeypatch, make_devices):
    monkeypatch.setattr(bucket, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 1)
    log = []
    model = Chain(log)
    for i, layer in enumerate(model.layers):
        layer.weight.register_hook(lambda grad, i=i: log.append(f"sum {i}"))
    launch = GradientBucket.launch

    def logged(self, grads):
        log.append("launch")
        return launch(self, grads)

    monkeypatch.setattr(GradientBucket, "launch", logged)
    model = DataParallel(model, make_devices(2), dispatch="sequential")
    model(torch.randn(4, 4)).sum().backward()
    # Of one queue the engine takes rank 1 first; each launch follows rank 0's gradient at once.
    rank_1 = [f"layer {i}" for i in reversed(range(5))]
    rank_0 = [entry for layer in rank_1 for entry in (layer, "launch")]
    # Nobody waits for a sum before the end, and they come in the order of their launches.
    assert log == [*rank_1, *rank_0, *(f"sum {i}" for i in reversed(range(5)))]


def test_without_sequence_numbers_sums_are_right(monkeypatch, communicator):
    class Node:
        grad_fn = object()

    weight = leaf(3)
    outputs = Broadcast.apply(communicator(2), weight)
    monkeypatch.setattr(functions, "apply", lambda *args: (Node, *outputs[1:]))
    rows = functions.broadcast(communicator(2), [weight])
    rows[1][0].sum().backward()
    assert torch.equal(weight.grad, torch.ones(3, dtype=torch.float64))
