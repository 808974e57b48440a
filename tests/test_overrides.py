"""Subclasses that override steps with torch's signatures, alone and together.

Every combination of the four steps, as a user writes them: calls of super(), calls of the functions
of torch.nn.parallel (on CPU ranks), and code of their own.
"""

from itertools import chain, combinations

import pytest
import torch
from torch import nn
from torch_on_cpu import torch_on_cpu

import pyparallel

STEPS = ("replicate", "scatter", "parallel_apply", "gather")
COMBINATIONS = list(chain.from_iterable(combinations(STEPS, k) for k in range(1, 5)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x, factor=1.0):
        self.rows += len(x)
        return {"y": self.linear(x) * factor}


def with_super(calls):
    def replicate(self, module, device_ids):
        calls.append(("replicate", module, list(device_ids)))
        return super(type(self), self).replicate(module, device_ids)

    def scatter(self, inputs, kwargs, device_ids):
        calls.append(("scatter", inputs, kwargs, list(device_ids)))
        return super(type(self), self).scatter(inputs, kwargs, device_ids)

    def parallel_apply(self, replicas, inputs, kwargs):
        calls.append(("parallel_apply", len(replicas), len(inputs), len(kwargs)))
        return super(type(self), self).parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs, output_device):
        calls.append(("gather", len(outputs), output_device))
        return super(type(self), self).gather(outputs, output_device)

    return locals()


def with_torch(calls):
    """As many subclasses do: the functions that torch's own methods call."""
    functions = nn.parallel

    def replicate(self, module, device_ids):
        calls.append(("replicate", module, list(device_ids)))
        return functions.replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(self, inputs, kwargs, device_ids):
        calls.append(("scatter", inputs, kwargs, list(device_ids)))
        return functions.scatter_gather.scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(self, replicas, inputs, kwargs):
        calls.append(("parallel_apply", len(replicas), len(inputs), len(kwargs)))
        ids = self.device_ids[: len(replicas)]
        return functions.parallel_apply(replicas, inputs, kwargs, ids)

    def gather(self, outputs, output_device):
        calls.append(("gather", len(outputs), output_device))
        return functions.gather(outputs, output_device, dim=self.dim)

    return locals()


def by_hand(calls):
    """No function of anybody."""

    def replicate(self, module, device_ids):
        calls.append(("replicate", module, list(device_ids)))
        return [module] * len(device_ids)

    def scatter(self, inputs, kwargs, device_ids):
        calls.append(("scatter", inputs, kwargs, list(device_ids)))
        chunks = inputs[0].chunk(len(device_ids))
        return [(chunk,) for chunk in chunks], [kwargs] * len(chunks)

    def parallel_apply(self, replicas, inputs, kwargs):
        calls.append(("parallel_apply", len(replicas), len(inputs), len(kwargs)))
        return [r(*i, **k) for r, i, k in zip(replicas, inputs, kwargs, strict=True)]

    def gather(self, outputs, output_device):
        calls.append(("gather", len(outputs), output_device))
        return {"y": torch.cat([output["y"] for output in outputs])}

    return locals()


def wrapped(net, names, kind, calls, devices):
    methods = {name: kind(calls)[name] for name in names}
    return type("Wrapper", (pyparallel.DataParallel,), methods)(net, devices)


@pytest.mark.parametrize("kind", [with_super, with_torch, by_hand])
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_overridden_steps(names, kind, monkeypatch):
    # The other rank's memory is the module's own where the user's replicate says so.
    monkeypatch.delenv("PYPARALLEL_CHECK_DEVICES", raising=False)
    net, alone, calls = Net(), Net(), []
    alone.load_state_dict(net.state_dict())
    model = wrapped(net, names, kind, calls, pyparallel.virtual_devices(3))
    assert isinstance(model, nn.DataParallel) and isinstance(model, pyparallel.DataParallel)
    for step in range(3):
        x = torch.randn(7, 3, requires_grad=True)
        with torch_on_cpu():
            y = model(x, factor=2.0)["y"]
        expected = alone(x, factor=2.0)["y"]
        torch.testing.assert_close(y, expected)
        assert [call[0] for call in calls] == [n for n in ORDER if n in names]
        for call in calls:
            assert call[1:] == expected_arguments(call, net, x)
        calls.clear()
        y.square().sum().backward()
        found, x.grad = x.grad, None
        expected.square().sum().backward()
        torch.testing.assert_close(found, x.grad)
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            with torch.no_grad():
                p.sub_(0.1)
                q.sub_(0.1)
        if kind is not by_hand or "replicate" not in names:
            assert net.rows == 3 * (step + 1)  # the first chunk's, three times


ORDER = ("scatter", "replicate", "parallel_apply", "gather")


def expected_arguments(call, net, x):
    return {
        "scatter": ((x,), {"factor": 2.0}, [0, 1, 2]),
        "replicate": (net, [0, 1, 2]),
        "parallel_apply": (3, 3, 3),
        "gather": (3, 0),
    }[call[0]]


@pytest.mark.parametrize("kind", [with_super, with_torch, by_hand])
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_without_gradients_and_with_fewer_rows(names, kind, monkeypatch):
    monkeypatch.delenv("PYPARALLEL_CHECK_DEVICES", raising=False)
    net, calls = Net(), []
    model = wrapped(net, names, kind, calls, pyparallel.virtual_devices(3))
    x = torch.randn(2, 3)
    with torch.no_grad(), torch_on_cpu():
        for _ in range(2):
            # Two rows: torch's scatter pads keyword arguments to all three devices, or fails.
            y = model(x)["y"]
            torch.testing.assert_close(y, net.linear(x))
            net.linear.weight.add_(1)
    arguments = {call[0]: call[1:] for call in calls}
    if "replicate" in names:
        assert arguments["replicate"] == (net, [0, 1])


def test_a_cooperative_mixin(make_devices):
    """Two subclasses in one, each of which changes a part."""

    class Shifted(pyparallel.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return super().scatter((inputs[0] + 1, *inputs[1:]), kwargs, device_ids)

    class Doubled(pyparallel.DataParallel):
        def gather(self, outputs, output_device):
            return super().gather([{"y": 2 * o["y"]} for o in outputs], output_device)

    class Both(Shifted, Doubled):
        pass

    net = Net().to(make_devices(1)[0].split(":")[0])
    x = torch.randn(5, 3, device=net.rows.device)
    y = Both(net, make_devices(2))(x)["y"]
    torch.testing.assert_close(y, 2 * net.linear(x + 1))


def test_outputs_may_stay_on_their_devices(make_devices):
    """As in encoders that compute the loss in parallel."""

    class Ungathered(pyparallel.DataParallel):
        def gather(self, outputs, output_device):
            return outputs

    net = Net().to(make_devices(1)[0].split(":")[0])
    outputs = Ungathered(net, make_devices(2))(torch.randn(5, 3))
    assert [len(output["y"]) for output in outputs] == [3, 2]
    sum(output["y"].sum().to(net.rows.device) for output in outputs).backward()
    assert net.linear.bias.grad.tolist() == [5, 5]


def test_a_scatter_that_takes_a_list_of_samples(make_devices):
    """As torch_geometric does: the argument is a list, and each device gets some of it."""

    class Lists(pyparallel.DataParallel):
        def forward(self, samples):
            return super().forward(samples)

        def scatter(self, inputs, kwargs, device_ids):
            (samples,) = inputs
            shares = [samples[rank :: len(device_ids)] for rank in range(len(device_ids))]
            return tuple((torch.stack(share),) for share in shares), ({},) * len(shares)

    net = Net()
    samples = list(torch.randn(4, 3))
    model = Lists(net, pyparallel.virtual_devices(2))
    y = model(samples)["y"]
    torch.testing.assert_close(y, net.linear(torch.stack(samples)[[0, 2, 1, 3]]))
