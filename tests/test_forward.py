"""Forward: what runs where for which inputs, the four steps that subclasses override."""

import copy
import inspect
import itertools
import threading

import pytest
import torch
from torch import nn

from pyparallel.data_parallel import DataParallel
from pyparallel.devices import virtual_devices


class Looks(nn.Module):
    """Notes what is called, where and with what, and returns its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls = []

    def forward(self, x):
        self.calls.append((self, threading.get_ident(), x))
        return x


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.behaviour(18)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stray", ["parameter", "buffer"])
def test_every_forward_looks_where_the_module_is(n, stray):
    net = nn.BatchNorm1d(3)
    model = DataParallel(net, virtual_devices(n))
    x = torch.randn(6, 3)
    model(x)
    if stray == "parameter":
        net.bias = nn.Parameter(net.bias.to("meta"))
    else:
        net.running_var = net.running_var.to("meta")
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            model(x)
        assert str(caught.value) == (
            "module must have its parameters and buffers on device cpu (device_ids[0]) but found "
            "one of them on device: meta"
        )
    net.bias, net.running_var = nn.Parameter(torch.zeros(3)), torch.ones(3)
    model(x)


@pytest.mark.cuda
@pytest.mark.behaviour(18, 19, 46, 48, 49, 52)
@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_may_be_anywhere(make_devices, pinned):
    devices = make_devices(3)
    net = nn.Linear(3, 2)
    model = DataParallel(net, devices)
    x = torch.randn(6, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="found one of them on device: cpu"):
        model(x)
    expected = net(x).detach()
    model.to(devices[0])
    for place in ("cpu", *devices):
        there = x.detach().to(place)
        if pinned and place == "cpu":
            there = there.pin_memory()
        there.requires_grad_()
        out = model(there)
        assert out.device == torch.device(devices[0])
        torch.testing.assert_close(out.cpu(), expected)
        out.sum().backward()
        assert there.grad.device == there.device
        torch.testing.assert_close(there.grad.cpu(), net.weight.sum(0).detach().cpu().expand(6, 3))


@pytest.mark.behaviour(21)
def test_without_arguments_the_output_is_joined_all_the_same():
    net = nn.Module()
    net.forward = lambda: torch.tensor(2.0)
    assert DataParallel(net, virtual_devices(1))().shape == ()
    with pytest.warns(UserWarning, match="but all input tensors were scalars"):
        assert DataParallel(net, virtual_devices(3))().tolist() == [2]


@pytest.mark.behaviour(22)
def test_one_device_splits_but_does_not_join(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "2")
    net = Looks()
    net.register_forward_hook(lambda module, args, output: object)
    x = [torch.ones(2)]
    assert DataParallel(net, [0], output_device=1)(x) is object
    ((module, thread, seen),) = net.calls
    assert module is net and thread == threading.get_ident()
    assert seen is not x and seen[0].data_ptr() == x[0].data_ptr()


@pytest.mark.behaviour(23)
@pytest.mark.parametrize("dispatch", ["auto", "threads", "sequential"])
def test_one_chunk_runs_on_a_replica_in_the_callers_thread(dispatch):
    net = Looks()
    for _ in range(3):
        assert DataParallel(net, virtual_devices(3), dispatch=dispatch)(torch.ones(1)).item() == 1
        module, thread, _ = net.calls.pop()
        assert not net.calls
        assert module is not net and thread == threading.get_ident()


@pytest.mark.behaviour(26)
def test_other_methods_are_those_of_the_wrapper():
    net = nn.Linear(2, 2)
    for cls in (DataParallel, nn.DataParallel):
        with pytest.raises(AttributeError) as caught:
            _ = cls(net).in_features
        assert str(caught.value) == "'DataParallel' object has no attribute 'in_features'"


@pytest.mark.behaviour(27)
def test_forwards_before_one_backward_add_up():
    net = nn.Linear(3, 2)
    model = DataParallel(net, virtual_devices(3))
    inputs = [torch.randn(size, 3) for size in (6, 1, 7)]
    losses = [model(x).square().sum() for x in inputs]
    (losses[0] + 2 * losses[2]).backward()
    losses[1].backward()
    grad, net.weight.grad = net.weight.grad, None
    losses = [net(x).square().sum() for x in inputs]
    (losses[0] + 2 * losses[2] + losses[1]).backward()
    torch.testing.assert_close(grad, net.weight.grad)


# The four steps.


@pytest.mark.behaviour(24)
@pytest.mark.parametrize("step", ["scatter", "replicate", "parallel_apply", "gather"])
def test_steps_have_torchs_signatures(step):
    ours, theirs = (
        inspect.signature(getattr(cls, step)).parameters for cls in (DataParallel, nn.DataParallel)
    )
    assert list(ours) == list(theirs)


class OwnScatter:
    def scatter(self, inputs, kwargs, device_ids):
        self.log.append(list(device_ids))
        chunks = inputs[0].chunk(len(device_ids))
        return [(chunk,) for chunk in chunks], [kwargs] * len(chunks)


class OwnReplicate:
    def replicate(self, module, device_ids):
        self.log.append((module, list(device_ids)))
        return [copy.deepcopy(module) for _ in device_ids]


class OwnParallelApply:
    def parallel_apply(self, replicas, inputs, kwargs):
        self.log.append((len(replicas), len(inputs), len(kwargs)))
        arguments = zip(replicas, inputs, kwargs, strict=True)
        return [replica(*args, **named) for replica, args, named in arguments]


class OwnGather:
    def gather(self, outputs, output_device):
        self.log.append((len(outputs), output_device))
        return torch.cat(outputs, self.dim)


OWN = [OwnScatter, OwnReplicate, OwnParallelApply, OwnGather]


@pytest.mark.behaviour(24)
@pytest.mark.parametrize(
    "own", [combination for k in range(1, 5) for combination in itertools.combinations(OWN, k)]
)
def test_each_step_can_be_replaced_alone_and_together(own):
    class Mine(*own, DataParallel):
        log = None

    net = nn.Linear(3, 2)
    model = Mine(net, virtual_devices(4), output_device="cpu:1")
    x = torch.randn(5, 3)  # three chunks
    for _ in range(2):
        model.log = []
        out = model(x)
        torch.testing.assert_close(out, net(x))
        seen = {
            OwnScatter: [0, 1, 2, 3],
            OwnReplicate: (net, [0, 1, 2]),
            OwnParallelApply: (3, 3, 3),
            OwnGather: (3, 1),
        }
        assert model.log == [seen[step] for step in own]
    if OwnReplicate not in own:
        out.sum().backward()
        torch.testing.assert_close(net.weight.grad, x.sum(0).expand(2, 3))


@pytest.mark.behaviour(24, 107)
def test_steps_can_be_called_by_other_code():
    """As torch_geometric does: a scatter with two arguments, and no keyword arguments."""

    class Lists(DataParallel):
        def forward(self, data):
            inputs = self.scatter(data, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)

        def scatter(self, data, device_ids):
            return [(row,) for row in data[: len(device_ids)]]

    net = nn.Linear(3, 2)
    rows = [torch.randn(1, 3) for _ in range(2)]
    out = Lists(net, virtual_devices(3))(rows)
    torch.testing.assert_close(out, net(torch.cat(rows)))
