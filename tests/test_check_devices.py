"""PYPARALLEL_CHECK_DEVICES: replicas that use the memory of another device are found."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import comm, virtual_devices
from pyparallel.devices import resolve_devices
from pyparallel.dispatch import Dispatcher
from pyparallel.parallel_apply import parallel_apply


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_CHECK_DEVICES", "1")


class Peek(nn.Module):
    """Calls a function with itself, its input and what replicas before it left in a list."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.left = []
        self.function = function

    def forward(self, x):
        return self.function(self, x, self.left)


def run(function, n=2, **kwargs):
    dp = pyparallel.DataParallel(
        Peek(function), device_ids=virtual_devices(n), dispatch="sequential", **kwargs
    )
    return dp(torch.ones(2 * n, 4))


def leave(what):
    """A function that uses what the replica before left there."""

    def function(module, x, left):
        left.append(what(module, x))
        return use(left[0], x)

    return function


def use(other, x):
    return x + other.sum()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("what", "name"),
    [
        (lambda module, x: module.linear.weight, "'linear.weight'"),
        (lambda module, x: module.seen, "'seen'"),
        (lambda module, x: x, "input"),
        (lambda module, x: x[1:], "input"),
        (lambda module, x: module.linear.weight.t()[:2].detach(), "'linear.weight'"),
        (lambda module, x: torch.from_numpy(module.seen.numpy()), "'seen'"),
    ],
)
def test_memory_of_another_rank_is_found_and_both_are_named(what, name, grad):
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError) as caught:
        run(leave(what))
    text = str(caught.value)
    assert "aten.sum.default in replica 1 on cpu:1" in text
    assert f"replica 0 on cpu:0: its {name} " in text
    assert text.startswith("Expected all tensors to be on the same device")


def test_views_and_writes_are_operators_too():
    with pytest.raises(RuntimeError, match="aten.view"):
        run(lambda module, x, left: (left.append(x), left[0].view(-1), x)[-1])
    with pytest.raises(RuntimeError, match="aten.add_"):
        run(lambda module, x, left: (left.append(module.seen), left[0].add_(1), x)[-1])
    with pytest.raises(RuntimeError, match="aten.cat"):
        run(lambda module, x, left: (left.append(x), torch.cat(left), x)[-1])


def test_the_original_belongs_to_the_first_rank():
    original = nn.Linear(4, 4)
    dp = pyparallel.DataParallel(original, device_ids=virtual_devices(3))
    dp.module.register_forward_hook(lambda *_: original.weight + 1)
    with pytest.raises(RuntimeError, match="in replica 1 on cpu:1 .* replica 0 .*'weight'"):
        dp(torch.ones(6, 4))


def test_what_is_right_passes():
    def function(module, x, left):
        left.append(x.sum())
        module.seen.add_(1)
        y = module.linear(x) + torch.ones(4) * module.seen
        return y.view(-1, 4) + torch.nn.functional.dropout(y)

    run(function, 4).sum().backward()


def test_ranks_on_one_device_share_its_memory():
    dp = pyparallel.DataParallel(
        Peek(leave(lambda module, x: module.linear.weight)), device_ids=["cpu:1", "cpu:1"]
    )
    dp(torch.ones(4, 4))


def test_memory_that_several_ranks_were_given_belongs_to_none():
    """As from a scatter of the user's whose .to(device) had nothing to copy."""
    batch = torch.ones(4, 4)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    devices = resolve_devices(virtual_devices(2))
    parallel_apply(modules, list(batch.chunk(2)), [{}, {}], devices)


def test_transfers_may_touch_everything():
    def function(module, x, left):
        left.append(x)
        return comm.reduce_add(left, 0) if len(left) == 2 else x

    run(function)


def test_in_workers_too():
    barrier = threading.Barrier(2, timeout=60)

    def function(module, x, left):
        left.append(x)
        barrier.wait()
        return left[0] + left[1]

    dp = pyparallel.DataParallel(Peek(function), device_ids=virtual_devices(2), dispatch="threads")
    with pytest.raises(RuntimeError, match="touches memory of replica [01] on cpu:[01]"):
        dp(torch.ones(4, 4))
    assert not torch._C._len_torch_dispatch_stack()


def test_compiled_code_still_compiles():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = module(torch.ones(4, 4))
    compiled = torch.compile(module, backend=backend)
    dp = pyparallel.DataParallel(compiled, device_ids=virtual_devices(2))
    torch.testing.assert_close(dp(torch.ones(4, 4)), expected)
    assert len(graphs) in (1, 2)  # torch 2.6 compiles once for each rank's mode


def test_nested_wrappers_pass():
    inner = pyparallel.DataParallel(nn.Linear(4, 4), device_ids=virtual_devices(2))
    dp = pyparallel.DataParallel(inner, device_ids=virtual_devices(2))
    dp(torch.ones(8, 4)).sum().backward()


def test_off_it_looks_at_nothing(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_CHECK_DEVICES", "0")
    depths = []
    run(lambda module, x, left: (depths.append(torch._C._len_torch_dispatch_stack()), x)[1])
    assert depths == [0, 0]
    run(leave(lambda module, x: module.linear.weight))


def test_a_wrong_value_is_refused(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_CHECK_DEVICES", "yes")
    with pytest.raises(ValueError, match="PYPARALLEL_CHECK_DEVICES must be one of 0, 1, but is"):
        run(lambda module, x, left: x)


def test_dynamo_is_not_imported():
    """That takes seconds, which every small script would wait for."""
    code = (
        "import sys, torch, pyparallel\n"
        "dp = pyparallel.DataParallel(torch.nn.Linear(2, 2), pyparallel.virtual_devices(2))\n"
        "for _ in range(20): dp(torch.ones(4, 2))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=120)


@pytest.mark.parametrize("dispatch", ["threads", "auto"])
def test_devices_are_named_as_the_user_named_them(dispatch):
    modules = [Peek(leave(lambda module, x: module.seen)) for _ in range(2)]
    modules[1].left = modules[0].left
    with pytest.raises(RuntimeError, match="replica [01] on cpu:[35] touches .* on cpu:[35]: its"):
        parallel_apply(
            modules,
            [torch.ones(2, 4), torch.ones(2, 4)],
            [{}, {}],
            resolve_devices(["cpu:3", "cpu:5"]),
            Dispatcher(dispatch),
        )
