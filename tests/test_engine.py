"""The step engine: every change is seen, nothing unchanged is sent, nothing grows."""

import copy
import functools
import gc
import os
import resource
import threading

import pytest
import torch
import torch.nn.functional as F
from engine_nets import N, Net
from torch import nn
from torch.nn.utils import parametrize

from pyparallel.data_parallel import DataParallel
from pyparallel.tree_pool import _MAX_TREES


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Every change is seen.


def scale(p, factor=1.5):
    with torch.no_grad():
        p.mul_(factor)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


CHANGES = {
    "step": lambda m: [scale(p) for p in m.parameters()],
    "data written": lambda m: m.first.weight.data.add_(1),
    "other data": lambda m: setattr(m.first.weight, "data", torch.randn(4, 4)),
    "transposed data": lambda m: setattr(
        m.first.weight, "data", m.first.weight.data.t()
    ),  # the same memory
    "load_state_dict": lambda m: m.load_state_dict(Net().state_dict()),
    "assigned state": lambda m: m.load_state_dict(Net().state_dict(), assign=True),
    "other parameter": lambda m: setattr(m.second, "weight", nn.Parameter(torch.randn(2, 4))),
    "entry": lambda m: m.second._parameters.update(weight=nn.Parameter(torch.randn(2, 4))),
    "no bias": lambda m: setattr(m.first, "bias", None),
    "tied": lambda m: (
        setattr(m.second, "weight", nn.Parameter(m.first.weight.detach()[:2]))
        or setattr(m.norm, "weight", m.first.bias)
    ),
    "shape": lambda m: (
        setattr(m.second, "weight", nn.Parameter(torch.randn(5, 4)))
        or setattr(m.second, "bias", None)
    ),
    "buffer written": lambda m: m.norm.running_mean.add_(1),
    "other buffer": lambda m: setattr(m.norm, "running_mean", torch.randn(4)),
    "attribute": lambda m: setattr(m, "factor", 3.0),
    "new attribute": lambda m: setattr(m.norm, "eps", 0.5),
    "attribute removed": lambda m: delattr(m.norm, "eps"),
    "replaced module": lambda m: setattr(m, "second", nn.Linear(4, 3)),
    "removed module": lambda m: (
        m.norm.register_module("extra", None) or setattr(m, "norm", nn.Identity())
    ),
    "module added": lambda m: setattr(m, "second", nn.Sequential(m.second, nn.Tanh())),
    "order": lambda m: setattr(
        m, "second", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())[::-1]
    ),
    "eval": lambda m: m.eval(),
    "dtype": lambda m: m.double(),
    "frozen": lambda m: m.first.requires_grad_(False),
    "thawed": lambda m: m.requires_grad_(False) and m.requires_grad_(True),
    "hook": lambda m: m.first.register_forward_hook(lambda mod, args, out: out + 1),
    "pre-hook": lambda m: m.second.register_forward_pre_hook(lambda mod, args: (args[0] - 1,)),
    "method": lambda m: setattr(m, "forward", functools.partial(F.linear, weight=m.second.weight)),
    "parametrized": lambda m: parametrize.register_parametrization(m.first, "weight", Doubled()),
    "class": lambda m: setattr(m.norm, "__class__", nn.Identity),
}


@pytest.mark.behaviour(174, 175)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_between_two_forwards_is_seen(change, grad, wrap):
    net = Net().eval()
    model = wrap(net)
    x = torch.randn(7, 4)
    with torch.set_grad_enabled(grad):
        model(x)
        change(net)
        x = x.to(next(net.parameters()).dtype)
        expected = torch.cat([net(chunk) for chunk in x.chunk(N)])
        torch.testing.assert_close(model(x), expected)
    if grad:
        parameters = [p for p in net.parameters() if p.requires_grad]
        torch.testing.assert_close(
            torch.autograd.grad(model(x).pow(2).sum(), parameters, allow_unused=True),
            torch.autograd.grad(net(x).pow(2).sum(), parameters, allow_unused=True),
        )


@pytest.mark.behaviour(174)
def test_containers_of_the_original_are_seen_to_change(wrap):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.layers = [self.a]
            self.table = {}

        def forward(self, x):
            for layer in [*self.layers, *self.table.values()]:
                x = layer(x)
            return x

    net = Listed()
    model = wrap(net)
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), net.a(x))
    net.layers.append(net.b)
    torch.testing.assert_close(model(x), net.b(net.a(x)))
    net.table["again"] = net.a
    torch.testing.assert_close(model(x), net.a(net.b(net.a(x))))
    net.layers.clear()
    torch.testing.assert_close(model(x), net.a(x))
    torch.autograd.grad(model(x).sum(), list(net.a.parameters()))


@pytest.mark.behaviour(174)
def test_attributes_of_parameters_are_seen_to_change(wrap):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.weight.gain

    net = Scaled(3, 3)
    model = wrap(net)
    x = torch.randn(5, 3)
    for gain in (1.0, 2.0):
        net.weight.gain = gain
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model(x), F.linear(x, net.weight, net.bias) * gain)


@pytest.mark.behaviour(174)
def test_the_module_itself_may_be_replaced(wrap):
    model = wrap(Net().eval())
    x = torch.randn(5, 4)
    model(x)
    model.module = Net().eval()
    torch.testing.assert_close(model(x), model.module(x))


def test_modes_alternate(wrap):
    net = Net().eval()
    model = wrap(net)
    x = torch.randn(6, 4)
    for mode in [torch.no_grad, torch.enable_grad, torch.inference_mode] * 2:
        with mode():
            torch.testing.assert_close(model(x), net(x))
        scale(net.first.weight)
    trees = model._engine.content._trees._trees
    assert len(trees) == 2


def test_validation_while_a_graph_keeps_the_old_weights(wrap):
    """eval() marks every module, and the kept graph makes every weight a new tensor."""
    net = Net()
    model = wrap(net)
    x = torch.randn(6, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(3):
        net.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x), net(x))
        net.train()
        loss = model(x).pow(2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()


def test_a_mode_that_changes_while_one_replica_is_kept(wrap):
    """What it wrote is undone when it is free again, and it gets the new mode before others."""

    class Writes(nn.Module):
        def forward(self, x):
            if self.training:
                self.seen = x
                kept.append(self)
            return x + self.training

    kept = []
    model = wrap(Writes())
    x = torch.zeros(3)
    assert model(x[:1]).tolist() == [1]
    model.eval()
    kept.clear()
    assert model(x).tolist() == [0, 0, 0]
    model.train()
    assert model(x).tolist() == [1, 1, 1]


def test_fewer_ranks_than_devices(wrap):
    net = Net().eval()
    model = wrap(net, 4)
    for batch in (8, 1, 2, 3, 8):
        x = torch.randn(batch, 4)
        model.zero_grad()
        model(x).sum().backward()
        expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
        torch.testing.assert_close([p.grad for p in net.parameters()], list(expected))


def test_modules_that_cannot_persist_are_replicated_afresh(wrap):
    class Own(nn.Linear):
        def _replicate_for_data_parallel(self):
            replica = super()._replicate_for_data_parallel()
            replica.made = getattr(self, "made", 0) + 1
            return replica

        def forward(self, x):
            return super().forward(x) * self.made

    strided = nn.Linear(3, 3)
    strided.weight = nn.Parameter(torch.randn(6, 3)[::2])
    for net in (Own(3, 3), torch.jit.script(nn.Linear(3, 3)), strided):
        model = wrap(net)
        x = torch.randn(5, 3)
        for _ in range(2):
            torch.testing.assert_close(model(x), F.linear(x, net.weight, net.bias))
            scale(net.bias)


# Nothing grows.


def test_nothing_grows_over_2000_steps(wrap):
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model = wrap(net, 2)
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(8, 8)

    def step():
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for _ in range(200):
        step()
    count, rss = tensors(), _rss()
    for _ in range(1800):
        step()
    assert tensors() <= count
    assert _rss() - rss < 8 << 20


def _rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_nothing_is_left_to_the_garbage_collector(wrap):
    class Writes(Net):
        def forward(self, x):
            self.kept = x
            return super().forward(x)

    for net in (Net(), Writes(), nn.LSTM(4, 4, batch_first=True)):
        model = wrap(net)
        x = torch.randn(6, 4) if isinstance(net, Net) else torch.randn(6, 5, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(model=model, x=x, optimizer=optimizer):
            out = model(x)
            (out if torch.is_tensor(out) else out[0]).sum().backward()
            optimizer.step()

        step()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                step()
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_trees_that_are_kept_do_not_add_up(wrap):
    kept = []

    class Kept(Net):
        def forward(self, x):
            kept.append(self)
            return super().forward(x)

    model = wrap(Kept())
    x = torch.randn(6, 4)
    for _ in range(20):
        model(x)
    assert len(set(map(id, kept))) == 20 * N
    assert len(model._engine.content._trees._trees) <= 8
    kept.clear()
    for _ in range(3):
        model(x)
        kept.clear()
    assert len(set(map(id, model._engine.content._trees._trees))) <= 8


# Several users.


def test_copies_and_forks_have_engines_of_their_own(wrap):
    model = wrap(Net().eval())
    x = torch.randn(6, 4)
    expected = model(x)
    other = copy.deepcopy(model)
    scale(other.module.second.weight, 0)
    assert not torch.equal(other(x), expected)
    assert torch.equal(model(x), expected)
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            ok = False
            try:
                with torch.no_grad():
                    ok = torch.allclose(model(x), expected)
            finally:
                os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.behaviour(173)
def test_nested_wrappers_persist_too(wrap):
    inner = wrap(Net().eval(), 2)
    outer = wrap(nn.Sequential(inner), 2)
    x = torch.randn(8, 4)
    for _ in range(3):
        torch.testing.assert_close(outer(x), inner.module(x))
        scale(inner.module.first.weight)
    assert inner._engine.content is None


@pytest.mark.behaviour(177)
def test_several_threads(wrap):
    net = Net().eval()
    model = wrap(net, 2)
    xs = [torch.randn(4, 4) for _ in range(6)]
    grads = [None] * len(xs)

    def run(i):
        for _ in range(5):
            grads[i] = torch.autograd.grad(model(xs[i]).pow(2).sum(), list(net.parameters()))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, grad in zip(xs, grads, strict=True):
        expected = torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()))
        torch.testing.assert_close(grad, expected)


def test_replicas_that_were_given_up_are_not_taken_for_modified(make_devices):
    """As when more threads run forwards than the engine keeps trees for."""
    dp = DataParallel(nn.Linear(3, 2), make_devices(2))
    held = [dp.replicate(dp.module, dp.device_ids) for _ in range(_MAX_TREES + 2)]
    assert dp._engine.content._trees.find(held[0][0]) is None
    for replicas in held:
        dp._engine.content.check_not_modified(replicas[0])
    with torch.no_grad():
        held[1][0].weight.zero_()
    with pytest.raises(RuntimeError, match="forward modified the parameter 'weight'"):
        held[0][0].weight.mul_(2)
        dp._engine.content.check_not_modified(held[0][0])
