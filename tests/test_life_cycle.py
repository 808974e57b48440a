"""Wrappers that several threads share, that are copied, saved, dropped in the middle of a step."""

import copy
import gc
import io
import pickle
import random
import threading
import weakref

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import workers


class Odd(Exception):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 64)
        self.second = nn.Linear(64, 300)
        self.third = nn.Linear(300, 3)

    def forward(self, x, marked=None):
        y = torch.relu(self.first(x))
        if marked is not None and bool((x == marked).any()):
            raise Odd
        return self.third(torch.relu(self.second(y)))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.fixture
def new_model(make_devices):
    """Makes wrappers; pytest itself would hold one for as long as the test lasts."""
    torch.manual_seed(0)
    return lambda: pyparallel.DataParallel(Net(), make_devices(3), bucket_cap_mb=0.05)


@pytest.fixture
def model(new_model):
    return new_model()


@pytest.mark.parametrize("dispatch", ["sequential", "threads", "auto"])
def test_threads_that_share_a_wrapper(dispatch, make_devices, monkeypatch):
    """Training, validation, errors and changes of mode at once; once 200 steps of each thread."""
    monkeypatch.setattr(workers, "cpu_count", lambda: 2)
    net = Net()
    model = pyparallel.DataParallel(net, make_devices(4), dispatch=dispatch, bucket_cap_mb=0.05)
    parameters = list(net.parameters())
    failures = []

    def step(kind, x):
        if kind == "odd":
            x[-1, 0] = 7
            with pytest.raises(Odd):
                model(x, marked=7.0)
        elif kind == "validation":
            with torch.no_grad():
                close(model(x), net(x))
        else:
            got = torch.autograd.grad(model(x).pow(2).sum(), parameters)
            close(got, torch.autograd.grad(net(x).pow(2).sum(), parameters))

    def run(seed):
        choice = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(15):
                x = torch.randn(choice.choice([4, 8, 9]), 4, generator=generator)
                step(choice.choice(["odd", "validation", "training"]), x.to(parameters[0].device))
                model.train(choice.random() < 0.5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failures and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("moment", ["before backward", "after an error", "in no_sync"])
def test_a_wrapper_that_is_dropped_in_the_middle_of_a_step(moment, new_model):
    model = new_model()
    net = model.module
    x = torch.randn(6, 4)
    if moment == "after an error":

        def stop(grad):
            raise Odd

        handle = net.third.weight.register_hook(stop)
        with pytest.raises(Odd):
            model(x).sum().backward()
        handle.remove()
        net.zero_grad()
    elif moment == "in no_sync":
        with model.no_sync():
            model(x).sum().backward()
        net.zero_grad()
    out = model(x)
    engine = weakref.ref(model._engine.content)
    trees = weakref.ref(engine()._trees)
    del model
    gc.collect()
    assert engine() is None and trees() is None
    out.pow(2).sum().backward()
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).pow(2).sum().backward()
    close(grads, [p.grad for p in net.parameters()])


def test_nothing_of_a_dropped_wrapper_is_left(new_model):
    model = new_model()
    x = torch.randn(6, 4)
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    engine = model._engine.content
    left = [weakref.ref(model), weakref.ref(model.module), weakref.ref(engine)]
    left += [weakref.ref(root) for tree in engine._trees._trees for root in tree.roots]
    left += [weakref.ref(copy) for memory in engine._memories for copy in memory.copies[-1]]
    del engine, model
    gc.collect()
    assert not [ref for ref in left if ref() is not None]


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("moment", ["new", "used", "graph", "no_sync"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved]
)
def test_copies_at_any_moment(duplicate, moment, model):
    x = torch.randn(6, 4)
    graph = model(x) if moment != "new" else None
    if moment == "no_sync":
        with model.no_sync():
            model(x).sum().backward()
            other = duplicate(model)
    else:
        other = duplicate(model)
    del graph
    assert list(other.state_dict()) == list(model.state_dict())
    for wrapper in (other, model):
        wrapper.zero_grad()
        wrapper(x).pow(2).sum().backward()
        grads = [p.grad for p in wrapper.module.parameters()]
        wrapper.zero_grad()
        wrapper.module(x).pow(2).sum().backward()
        close(grads, [p.grad for p in wrapper.module.parameters()])
    with torch.no_grad():
        other.module.first.weight.zero_()
    close(model(x), model.module(x))


def test_a_shallow_copy_shares_module_and_replicas(model):
    x = torch.randn(6, 4)
    other = copy.copy(model)
    assert other.module is model.module
    for wrapper in (model, other, model):
        with torch.no_grad():
            model.module.first.weight.mul_(0.9)
        close(wrapper(x), model.module(x))


def test_names_of_threads(model):
    names = []

    class Named(Net):
        def forward(self, x):
            names.append(threading.current_thread().name)
            return super().forward(x)

    model.module = Named()
    model._dispatcher = pyparallel.dispatch.Dispatcher("threads")
    model(torch.randn(6, 4))
    kind = torch.device(model.src_device_obj).type
    assert sorted(names) == sorted(f"pp-{kind}:{index}" for index in model.device_ids)
