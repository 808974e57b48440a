"""no_sync: gradients stay on the ranks, and the next sum is that of all of them."""

import copy

import pytest
import torch
from torch import nn

from pyparallel.data_parallel import DataParallel
from pyparallel.gradient_bucket import GradientBucket


class Net(nn.Module):
    """Some parameters are used only if asked for."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.other = nn.Linear(4, 2)
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x, use="second"):
        hidden = torch.tanh(self.first(x))
        if use == "table":
            return self.table((x[:, 0] > 0).long()) * hidden[:, :3]
        return getattr(self, use)(hidden)


@pytest.fixture
def pair(make_devices):
    torch.manual_seed(0)
    net = Net().double()
    return net, DataParallel(copy.deepcopy(net), make_devices(3))


def compare_grads(model, net):
    for a, b in zip(model.module.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            grad, expected = (g.to_dense() if g.is_sparse else g for g in (a.grad, b.grad))
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10)


def batches(count, size=7):
    return [torch.randn(size, 3, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("bucket_cap_mb", [None, 1e-5])
@pytest.mark.parametrize(
    "uses",
    [
        ["second"] * 3,
        ["second", "other", "second"],
        ["other", "second", "second"],  # not reached by the backward outside
        ["table", "table", "table"],
        ["table", "second", "second"],
    ],
)
def test_gradients_are_exact(uses, bucket_cap_mb, pair):
    net, model = pair
    model.bucket_cap_mb = bucket_cap_mb
    for _ in range(2):
        net.zero_grad()
        model.zero_grad()
        *inside, last = zip(batches(3), uses, strict=True)
        with model.no_sync():
            for x, use in inside:
                model(x, use).pow(2).sum().backward()
        model(last[0], last[1]).pow(2).sum().backward()
        for x, use in [*inside, last]:
            net(x, use).pow(2).sum().backward()
        compare_grads(model, net)


@pytest.mark.report("pytorch#13824")
def test_nothing_is_summed_inside(pair, monkeypatch):
    _, model = pair
    sums = []
    launch = GradientBucket.launch
    monkeypatch.setattr(
        GradientBucket, "launch", lambda self, grads: sums.append(self) or launch(self, grads)
    )
    with model.no_sync():
        for x in batches(3):
            model(x).sum().backward()
    assert not sums
    model(batches(1)[0]).sum().backward()
    assert len(sums) == 1


def test_parameters_that_only_later_ranks_use(pair):
    net, model = pair
    x = torch.randn(6, 3, dtype=torch.float64)
    with model.no_sync():
        # One sample: rank 0 only. Then a batch whose gradient is zero there.
        model(x[:1]).sum().backward()
        model(x).pow(2).sum().backward()
    model(x[:1]).sum().backward()
    for part in (x[:1], x, x[:1]):
        (net(part).pow(2) if len(part) > 1 else net(part)).sum().backward()
    compare_grads(model, net)


def old_idiom(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def new_zeros(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


ZERO_GRAD = {
    "wrapper": lambda model: model.zero_grad(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "old idiom": old_idiom,
    "new zeros": new_zeros,
}


@pytest.mark.parametrize("use", ["second", "table"])
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("way", ZERO_GRAD)
def test_zero_grad_forgets_what_was_kept(way, between, use, pair):
    net, model = pair
    with model.no_sync():
        model(batches(1)[0], use=use).sum().backward()
        ZERO_GRAD[way](model)
        if between:  # a backward that does not reach all of them
            x = batches(1)[0]
            model(x, use="other").sum().backward()
            net(x, use="other").sum().backward()
    x = batches(1)[0]
    model(x, use=use).sum().backward()
    net(x, use=use).sum().backward()
    for a, b in zip(model.module.parameters(), net.parameters(), strict=True):
        b.grad = torch.zeros_like(b) if b.grad is None and a.grad is not None else b.grad
    compare_grads(model, net)


def test_gradients_changed_in_place_keep_the_others_parts(pair):
    net, model = pair
    x = batches(1, 6)[0]
    with model.no_sync():
        model(x).sum().backward()
    scaled = [p.grad.mul_(2).clone() for p in model.module.second.parameters()]
    model(x).sum().backward()
    net(x).sum().backward()
    first = [p.grad for p in net.second.parameters()]
    for p, two, whole in zip(model.module.second.parameters(), scaled, first, strict=True):
        # Twice the first device's part, the parts of the others, and a whole gradient.
        torch.testing.assert_close(p.grad, two + (whole - two / 2) + whole)


@pytest.mark.parametrize("inside", [False, True])
def test_backward_into_some_parameters_leaves_the_parts_of_the_others(inside, pair):
    net, model = pair
    x, z = batches(2)
    with model.no_sync():
        model(x).sum().backward()
        if inside:
            torch.autograd.backward(model(z).sum(), inputs=list(model.module.second.parameters()))
    if not inside:
        torch.autograd.backward(model(z).sum(), inputs=list(model.module.second.parameters()))
    net(x).sum().backward()
    torch.autograd.backward(net(z).sum(), inputs=list(net.second.parameters()))
    if inside:
        model(x).sum().backward()
        net(x).sum().backward()
    compare_grads(model, net)


def test_autograd_grad_and_recorded_gradients_are_whole_inside(pair):
    net, model = pair
    x, y = batches(2)
    used = [p for m in (net.first, net.second) for p in m.parameters()]
    mine = [p for m in (model.module.first, model.module.second) for p in m.parameters()]
    expected = torch.autograd.grad(net(y).sum(), used)
    with model.no_sync():
        model(x).sum().backward()
        torch.testing.assert_close(torch.autograd.grad(model(y).sum(), mine), expected)
        grads = torch.autograd.grad(model(y).sum(), mine, create_graph=True)
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(torch.autograd.grad(model(y).sum(), mine), expected)
    model(y).sum().backward()  # what was kept is still there
    net(x).sum().backward()
    net(y).sum().backward()
    compare_grads(model, net)


def test_weights_may_change_meanwhile(pair):
    net, model = pair
    x, y = batches(2)
    with model.no_sync():
        model(x).sum().backward()
    net(x).sum().backward()
    for m in (net, model.module):
        m.second.weight.data = m.second.weight.data * 2
        m.other = nn.Identity()
    model(y).sum().backward()
    net(y).sum().backward()
    compare_grads(model, net)


def test_contexts_nest_and_end_with_errors(pair):
    net, model = pair
    x = batches(1)[0]
    with pytest.raises(ValueError), model.no_sync():
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        raise ValueError
    model(x).sum().backward()
    for _ in range(3):
        net(x).sum().backward()
    compare_grads(model, net)


def test_with_one_device_or_none_it_does_nothing(make_devices):
    for devices in ([], make_devices(1)):
        net = nn.Linear(2, 2)
        model = DataParallel(net, devices)
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        assert net.weight.grad is not None
