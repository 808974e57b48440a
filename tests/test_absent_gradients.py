"""Hooks of parameters that a backward does not reach: as on one device, nobody calls them."""

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import DataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, x, both=False):
        return self.used(x) + self.unused(x) if both else self.used(x)


class Calls(list):
    def watch(self, net):
        for name, parameter in net.named_parameters():
            self.watch_one(name, parameter)

    def watch_one(self, name, parameter):
        parameter.register_hook(lambda grad: self.append((name, "hook", grad.shape)))
        parameter.register_post_accumulate_grad_hook(
            lambda p: self.append((name, "after", p.grad.shape))
        )

    def taken(self):
        calls = sorted(self)
        self.clear()
        return calls


def as_function(net, devices):
    return lambda *args: pyparallel.data_parallel(net, args, devices)


@pytest.fixture(params=[DataParallel, as_function])
def wrap(request, make_devices):
    return lambda net: request.param(net, make_devices(2))


def backward(model, net, both=False):
    model(torch.ones(4, 3), both).sum().backward()


def grad(model, net, both=False):
    torch.autograd.grad(model(torch.ones(4, 3), both).sum(), [net.used.weight])


def grad_of_all(model, net, both=False):
    y = model(torch.ones(4, 3), both).sum()
    torch.autograd.grad(y, list(net.parameters()), allow_unused=True)


def with_graph(model, net, both=False):
    y = model(torch.ones(4, 3), both).sum()
    torch.autograd.grad(y, list(net.parameters()), create_graph=True, allow_unused=True)


def of_inputs(model, net, both=False):
    model(torch.ones(4, 3), both).sum().backward(inputs=[net.used.weight, net.unused.bias])


@pytest.mark.parametrize("how", [backward, grad, grad_of_all, with_graph, of_inputs])
def test_calls_of_hooks_are_those_of_one_device(wrap, how):
    alone, net = Net(), Net()
    model = wrap(net)
    ours, expected = Calls(), Calls()
    ours.watch(net)
    expected.watch(alone)
    for both in (False, False, True, False):
        how(model, net, both)
        how(alone, alone, both)
        assert ours.taken() == expected.taken()
        assert [p.grad is None for p in net.parameters()] == [
            p.grad is None for p in alone.parameters()
        ]


@pytest.mark.parametrize("kind", ["hook", "after"])
def test_hooks_of_one_kind(wrap, kind):
    net, calls = Net(), []
    register = {
        "hook": net.unused.weight.register_hook,
        "after": net.unused.weight.register_post_accumulate_grad_hook,
    }[kind]
    register(lambda tensor: calls.append(tensor.shape))
    model = wrap(net)
    backward(model, net)
    assert calls == []
    backward(model, net, both=True)
    assert calls == [(2, 3)]


def test_hooks_in_their_order_and_with_their_results(wrap):
    net = Net()
    model = wrap(net)
    weight = net.unused.weight
    weight.register_hook(lambda grad: grad + 1)
    doubling = weight.register_hook(lambda grad: grad * 2)
    backward(model, net)
    backward(model, net, both=True)
    assert torch.equal(weight.grad, torch.full((2, 3), 10.0))  # (4 + 1) * 2
    weight.grad = None
    backward(model, net)
    doubling.remove()
    backward(model, net, both=True)
    assert torch.equal(weight.grad, torch.full((2, 3), 5.0))


def test_a_hook_that_registers_and_removes_hooks(wrap):
    net, calls = Net(), []
    model = wrap(net)

    def once(grad):
        calls.append("once")
        handle.remove()
        net.unused.weight.register_hook(lambda grad: calls.append("later"))

    handle = net.unused.weight.register_hook(once)
    backward(model, net)
    assert calls == []
    backward(model, net, both=True)
    backward(model, net)
    backward(model, net, both=True)
    assert calls == ["once", "later"]


def test_after_an_error_between(wrap):
    """Every parameter's hooks are there again, and run once."""

    def fail(grad):
        raise ValueError("here")

    net, calls = Net(), Calls()
    model = wrap(net)
    failing = [p.register_hook(fail) for p in net.used.parameters()]
    for name, parameter in net.unused.named_parameters():
        calls.watch_one(name, parameter)
    with pytest.raises(ValueError, match="here"):
        backward(model, net)
    for handle in failing:
        handle.remove()
    backward(model, net)
    assert calls.taken() == []
    backward(model, net, both=True)
    assert calls.taken() == [
        ("bias", "after", (2,)),
        ("bias", "hook", (2,)),
        ("weight", "after", (2, 3)),
        ("weight", "hook", (2, 3)),
    ]
