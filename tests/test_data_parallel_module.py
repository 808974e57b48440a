"""The wrapper as a class and a module: subclasses, state, copies, torch.compile."""

import copy
import io
import pickle

import pytest
import torch
from networks import Scaled
from torch import nn

from pyparallel.data_parallel import DataParallel
from pyparallel.devices import virtual_devices


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Subclasses.


@pytest.mark.behaviour(24)
def test_subclasses_override_the_four_steps():
    log = []

    class Logged(DataParallel):
        def replicate(self, module, device_ids):
            log.append(("replicate", device_ids))
            return super().replicate(module, device_ids)

        def scatter(self, inputs, kwargs, device_ids):
            log.append(("scatter", device_ids))
            return super().scatter(inputs, kwargs, device_ids)

        def parallel_apply(self, replicas, inputs, kwargs):
            log.append(("parallel_apply", len(replicas)))
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            log.append(("gather", output_device))
            return super().gather(outputs, output_device)

    net = Scaled().eval()
    x = torch.randn(5, 3)
    out = Logged(net, virtual_devices(4))(x)
    assert out.shape == (5, 2)
    assert log == [
        ("scatter", [0, 1, 2, 3]),
        ("replicate", [0, 1, 2]),
        ("parallel_apply", 3),
        ("gather", 0),
    ]


def test_a_subclass_may_change_the_replicas():
    class Doubled(DataParallel):
        def replicate(self, module, device_ids):
            replicas = super().replicate(module, device_ids)
            for replica in replicas:
                doubled = replica.linear.weight * 2
                doubled.__class__ = nn.Parameter
                replica.linear._parameters["weight"] = doubled
            return replicas

    net = nn.Module()
    net.linear = nn.Linear(2, 2, bias=False)
    net.forward = net.linear.forward
    Doubled(net, virtual_devices(2))(torch.ones(2, 2)).sum().backward()
    assert torch.equal(net.linear.weight.grad, torch.full((2, 2), 4.0))


@pytest.mark.report(
    "pytorch_geometric#101",
    "pytorch_geometric#438",
    "pytorch_geometric#663",
    "pytorch_geometric#1088",
    "pytorch_geometric#1628",
    "pytorch_geometric#1790",
    "pytorch_geometric#1810",
    "pytorch_geometric#1979",
    "pytorch_geometric#1333",
)
@pytest.mark.behaviour(24)
def test_cooperative_inheritance():
    class Framework(nn.DataParallel):
        def __init__(self, module, device_ids=None, output_device=None):
            super().__init__(module, device_ids, output_device)
            self.extra = True

    class Both(Framework, DataParallel):
        pass

    model = Both(Scaled(), virtual_devices(2))
    assert model.extra and model.device_ids == [0, 1]
    assert model(torch.randn(4, 3)).shape == (4, 2)


# The wrapper as a module.


@pytest.mark.behaviour(169)
def test_state_dict_has_torchs_keys():
    net = Scaled()
    model = DataParallel(net, virtual_devices(2))
    assert list(model.state_dict()) == ["module." + key for key in net.state_dict()]
    other = DataParallel(Scaled(), virtual_devices(2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.module.linear.weight, net.linear.weight)


@pytest.mark.behaviour(171)
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), "torch.save"],
)
def test_copies_work(duplicate):
    model = DataParallel(Scaled().eval(), virtual_devices(2))
    if duplicate == "torch.save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = duplicate(model)
    x = torch.randn(4, 3)
    torch.testing.assert_close(other(x), model(x))
    assert other.module.linear.weight is not model.module.linear.weight
    assert other.device_ids == [0, 1]


# torch.compile.


@pytest.mark.behaviour(90)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("n", [0, 1, 3])
def test_torch_compile_around_the_wrapper(n):
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    reference = copy.deepcopy(net)
    x = torch.randn(6, 3)
    reference(x).sum().backward()
    compiled = torch.compile(
        DataParallel(net, virtual_devices(n)), backend="eager", fullgraph=n == 0
    )
    for _ in range(2):
        net.zero_grad()
        compiled(x).sum().backward()
        torch.testing.assert_close(net[0].weight.grad, reference[0].weight.grad)


def test_torch_compile_inside_the_wrapper():
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    reference = copy.deepcopy(net)
    x = torch.randn(6, 3)
    reference(x).sum().backward()
    model = DataParallel(torch.compile(net, backend="eager"), virtual_devices(3))
    for _ in range(2):
        net.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(net[0].weight.grad, reference[0].weight.grad)
