"""When gradients are summed, and what reads the sums."""

import copy
import threading

import pytest
import torch
from nets import compare_grads
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyparallel import bucket
from pyparallel.gradient_bucket import GradientBucket

launch, wait = GradientBucket.launch, GradientBucket.wait


@pytest.fixture
def _late_sums(monkeypatch):
    """Sums that are NaN until somebody waits for them."""
    late = {}

    def late_launch(self, grads):
        sums = launch(self, grads)
        wait(self)
        for total in sums:
            if total is not None and total.layout is torch.strided:
                late.setdefault(id(self), []).append((total.data, total.clone()))
                total.data.fill_(float("nan"))
        return sums

    def late_wait(self):
        for alias, total in late.pop(id(self), ()):
            alias.copy_(total)

    monkeypatch.setattr(GradientBucket, "launch", late_launch)
    monkeypatch.setattr(GradientBucket, "wait", late_wait)


# A1: bucket nodes have high sequence numbers. Without, their sums start after the last gradient.


@pytest.mark.behaviour(101)
def test_a1_a_sum_starts_as_soon_as_its_last_gradient_exists(wrap, monkeypatch):
    monkeypatch.setattr(bucket, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 1)
    log = []

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                x.register_hook(lambda grad, i=i: log.append(i))
            return x

    model = wrap(Chain(), 2, dispatch="sequential")
    monkeypatch.setattr(
        GradientBucket, "launch", lambda self, grads: (log.append("sum"), launch(self, grads))[1]
    )
    for _ in range(2):
        log.clear()
        model(torch.randn(4, 3)).sum().backward()
        assert log == [3, 2, 1, 0, 3, "sum", 2, "sum", 1, "sum", 0, "sum"]


# A2, A3: a gate waits before anything reads a sum. Without, each of these reads NaN.


def l2(m, x):
    (m(x).sum() + sum((p**2).sum() for p in m.parameters())).backward()


def existing_grads(m, x):
    for _ in range(2):
        m(x).pow(2).sum().backward()


def zeroed_grads(m, x):
    m(x).sum().backward()
    m.zero_grad(set_to_none=False)
    m(x).pow(2).sum().backward()


def two_forwards(m, x):
    (m(x).sum() + m(x + 1).pow(2).sum()).backward()


def hook_of_a_parameter(m, x):
    for p in m.parameters():
        p.register_hook(lambda grad: grad * 2)
    m(x).sum().backward()


def hook_after_accumulation(m, x):
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
    m(x).sum().backward()


def hook_of_the_accumulating_node(m, x):
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in m.parameters()]
    seen = []
    for node in nodes:
        node.register_prehook(lambda grads: seen.append(grads[0].clone()) or None)
    m(x).sum().backward()
    assert len(seen) == 4 and not any(grad.isnan().any() for grad in seen)


def anomaly_mode(m, x):
    with torch.autograd.detect_anomaly(check_nan=True):
        m(x).sum().backward()


def gradients_as_results(m, x):
    for p, grad in zip(
        m.parameters(), torch.autograd.grad(m(x).sum(), list(m.parameters())), strict=True
    ):
        p.grad = grad * 2


def some_inputs_only(m, x):
    m(x).sum().backward(inputs=[next(m.parameters())])


def create_graph(m, x):
    grads = torch.autograd.grad(m(x).pow(2).sum(), list(m.parameters()), create_graph=True)
    sum(grad.pow(2).sum() for grad in grads).backward()


def retained_graph(m, x):
    loss = m(x).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def reentrant_checkpoint(m, x):
    checkpoint(m, x.clone().requires_grad_(), use_reentrant=True).sum().backward()


def two_threads(m, x):
    losses = [m(x).sum(), m(x + 1).pow(2).sum()]
    # One after the other would do; at once they also run the same nodes at once.
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
        thread.join()


@pytest.mark.usefixtures("_late_sums")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "run",
    [
        l2,
        existing_grads,
        zeroed_grads,
        two_forwards,
        hook_of_a_parameter,
        hook_after_accumulation,
        hook_of_the_accumulating_node,
        anomaly_mode,
        gradients_as_results,
        some_inputs_only,
        create_graph,
        retained_graph,
        reentrant_checkpoint,
        two_threads,
    ],
    ids=lambda run: run.__name__,
)
def test_a3_nobody_reads_a_sum_that_is_not_there_yet(run, pair):
    net, model, x = pair
    run(net, x)
    run(model, x)
    compare_grads(model, net)


@pytest.mark.usefixtures("_late_sums")
def test_a3_after_an_error_in_backward_gradients_are_none(pair, monkeypatch):
    net, model, x = pair

    def fail(grad):
        raise ValueError("stop")

    out = model(x.requires_grad_())
    handle = x.register_hook(fail)
    monkeypatch.setattr(bucket, "FIRST_BUCKET_BYTES", 1)
    with pytest.raises(ValueError, match="stop"):
        out.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    model(x).sum().backward()
    net(x).sum().backward()
    compare_grads(model, net)


def test_a3_two_threads_wait_for_each_others_sums(wrap):
    net = nn.Linear(400, 400)
    model = wrap(copy.deepcopy(net))
    x = torch.randn(6, 400)
    losses = [model(x).sum() for _ in range(8)]
    grads = [None] * len(losses)

    def backward(i):
        grads[i] = torch.autograd.grad(losses[i], list(model.parameters()))

    threads = [threading.Thread(target=backward, args=(i,)) for i in range(len(losses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    for pair_of_grads in grads:
        for a, b in zip(pair_of_grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a3_gradients_are_kept_without_a_copy_and_count_their_own_versions(wrap, monkeypatch):
    addresses = []

    def spying(self, grads):
        sums = launch(self, grads)
        addresses.extend(total.data_ptr() for total in sums)
        return sums

    monkeypatch.setattr(GradientBucket, "launch", spying)
    net = nn.Sequential(nn.Conv2d(2, 60, 3), nn.Conv2d(60, 60, 3))  # long enough to be queued
    net = net.to(memory_format=torch.channels_last)
    model = wrap(net)
    kept = []
    for _ in range(2):
        addresses.clear()
        model.zero_grad()
        model(torch.randn(6, 2, 5, 5)).sum().backward()
        grads = [p.grad for p in net.parameters()]
        assert sorted(grad.data_ptr() for grad in grads) == sorted(addresses)
        assert all(p.grad.stride() == p.stride() for p in net.parameters())
        grads[0].mul_(2)
        assert [grad._version for grad in grads] == [1, 0, 0, 0]
        kept += grads
    assert len({grad.data_ptr() for grad in kept}) == len(kept)
