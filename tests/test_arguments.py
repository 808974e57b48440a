"""Modules of the wrapped tree among the arguments become the replica's own."""

import functools
import weakref

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel.arguments import with_own_modules


class Through(nn.Module):
    """As GRPO sends a method call through the wrapper."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen = []

    def forward(self, argument, x, keyword=None):
        self.seen.append((self, argument, keyword))
        return self.inner(x)

    def score(self, x):
        return self.inner(x)


@pytest.fixture
def through(make_devices):
    devices = make_devices(3)
    where = "cpu" if devices[0].startswith("cpu") else devices[0]
    return pyparallel.DataParallel(Through().to(where), devices)


@pytest.fixture
def x(through):
    return torch.ones(6, 2, device=through.src_device_obj)


ARGUMENTS = {
    "module": (lambda m: m, lambda replica, a: a is replica),
    "child": (lambda m: [{"of": m.inner}], lambda replica, a: a[0]["of"] is replica.inner),
    "tuple": (lambda m: (1, m), lambda replica, a: a[1] is replica),
    "bound method": (lambda m: m.score, lambda replica, a: a.__self__ is replica),
    "partial": (lambda m: functools.partial(m.score), lambda r, a: a.func.__self__ is r),
    "closure": (lambda m: lambda: m, lambda replica, a: a() is replica),
}


@pytest.mark.behaviour(36)
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_replica_gets_its_own(name, keyword, through, x):
    make, is_own = ARGUMENTS[name]
    argument = make(through.module)
    through(
        *((None, x) if keyword else (argument, x)), **({"keyword": argument} if keyword else {})
    )
    seen = through.module.seen
    assert len(seen) == 3
    for replica, first, second in seen:
        assert is_own(replica, second if keyword else first)


def test_other_modules_and_functions_are_handed_on(through, x):
    stranger = nn.Linear(2, 2)
    for argument in (stranger, stranger.forward, lambda: stranger, len, "text", None):
        through(argument, x)
        assert all(a is argument or a == argument for _, a, _ in through.module.seen)
        through.module.seen.clear()


def test_gradients(through, x):
    class Ask(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, model, inputs):
            return model.inner(inputs["x"]) * inputs["beta"]

    module = Ask().to(x.device)
    dp = pyparallel.DataParallel(module, [*through.device_ids] if x.is_cuda else ["cpu:0", "cpu:1"])
    dp(module, {"x": x, "beta": torch.tensor(2.0, device=x.device)}).sum().backward()
    assert torch.equal(module.inner.weight.grad, torch.full((2, 2), 12.0, device=x.device))


def test_replicas_are_used_again(through, x):
    def roots():
        through(through.module, x)
        seen = [weakref.ref(replica) for replica, _, _ in through.module.seen]
        through.module.seen.clear()
        return seen

    roots()
    first, second = roots(), roots()
    assert all(a() is not None and a() is b() for a, b in zip(first, second, strict=True))


def test_what_forward_writes_is_freed_after_it(make_devices):
    class Keeps(nn.Module):
        def forward(self, model, x):
            self.kept = x + 1
            kept.append(weakref.ref(self.kept))
            return x

    kept = []
    devices = make_devices(2)
    model = Keeps()
    x = torch.ones(4, device="cpu" if devices[0].startswith("cpu") else devices[0])
    dp = pyparallel.DataParallel(model, devices)
    dp(model, x)
    assert [ref() for ref in kept] == [None, None]


def test_replicas_of_another_make():
    """A subclass may replicate in its own way, and have other modules in its replicas."""
    module = nn.Sequential(nn.Linear(1, 1))
    inputs, kwargs = [(module,)], [{}]
    assert with_own_modules(module, [nn.Linear(1, 1)], inputs, kwargs)[0][0] == (module,)
    assert with_own_modules(module, [], [], []) == ([], [])
    assert with_own_modules(module, [module], [torch.ones(1)], [None]) == ([torch.ones(1)], [None])
