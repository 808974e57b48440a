"""The wrapper as a module: state, movement, what other code asks it, where it may stand."""

import io
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from pyparallel.data_parallel import DataParallel
from pyparallel.devices import virtual_devices


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def model(net):
    return DataParallel(net, virtual_devices(3))


@pytest.mark.behaviour(169)
def test_checkpoints_of_either_load_into_the_other(net, model):
    theirs = nn.DataParallel(Net())
    model.load_state_dict(theirs.state_dict())
    assert torch.equal(net.linear.weight, theirs.module.linear.weight)
    nn.init.ones_(net.linear.weight)
    theirs.load_state_dict(model.state_dict())
    assert torch.equal(theirs.module.linear.weight, torch.ones(2, 3))
    state = model.state_dict()
    consume_prefix_in_state_dict_if_present(state, "module.")
    Net().load_state_dict(state)


@pytest.mark.behaviour(170)
@pytest.mark.parametrize(
    "names",
    [
        lambda m: [name for name, _ in m.named_parameters()],
        lambda m: [name for name, _ in m.named_buffers()],
        lambda m: [name for name, _ in m.named_children()],
        lambda m: [name for name, _ in m.named_modules()],
        lambda m: sorted(m._modules),
        lambda m: (m._parameters, m._buffers),
    ],
)
def test_names_are_torchs(model, names):
    model(torch.randn(6, 3))
    assert names(model) == names(nn.DataParallel(Net()))


@pytest.mark.behaviour(170)
def test_methods_of_modules_act_on_the_wrapped_one(net, model):
    parameters = [id(parameter) for parameter in net.parameters()]
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert model.eval() is model and not net.norm.training
    model.train()
    assert net.norm.training
    model.half()
    assert net.linear.weight.dtype == torch.float16
    model.to(torch.float64).double()
    out = model(torch.randn(6, 3, dtype=torch.float64))
    assert out.dtype == torch.float64
    out.sum().backward()
    model.zero_grad()
    assert net.linear.weight.grad is None
    model.apply(lambda m: isinstance(m, nn.Linear) and nn.init.zeros_(m.weight))
    assert not net.linear.weight.any()
    model.requires_grad_(False)
    assert not net.linear.weight.requires_grad
    assert [id(parameter) for parameter in model.parameters()] == parameters


@pytest.mark.behaviour(171)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPUs")
@pytest.mark.parametrize("n", [1, 2])
def test_a_wrapper_of_gpus_on_a_machine_without(monkeypatch, n):
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: True)
        there.setattr(torch.cuda, "device_count", lambda: n)
        there.setattr(nn.ReLU, "to", lambda self, device: self)
        same = types.SimpleNamespace(total_memory=1, multi_processor_count=1)
        there.setattr(torch.cuda, "get_device_properties", lambda index: same)
        saved = pickle.dumps(DataParallel(nn.ReLU()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = pickle.loads(saved)
    assert model.device_ids == list(range(n)) and isinstance(model.module, nn.ReLU)
    with pytest.raises(ValueError, match="cuda:0 is not there: this machine has 0 GPUs") as caught:
        model(torch.ones(4))
    assert f"made for the GPUs {list(range(n))}: make another" in str(caught.value)
    assert DataParallel(model.module, virtual_devices(2))(torch.ones(4)).tolist() == [1] * 4


@pytest.mark.behaviour(172)
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
def test_code_that_asks_for_torchs_class(model):
    assert isinstance(model, nn.DataParallel) and issubclass(DataParallel, nn.DataParallel)
    with pytest.raises(Exception, match="torch.nn.DataParallel is not supported by ONNX exporter"):
        torch.onnx.export(model, torch.randn(6, 3), io.BytesIO(), dynamo=False)
    with pytest.raises(RuntimeError, match="stateless API can't be used with nn.DataParallel"):
        torch.func.functional_call(model, {}, torch.randn(6, 3))


@pytest.mark.behaviour(173)
def test_a_wrapper_inside_of_another_module(net):
    outer = nn.Sequential(nn.Linear(3, 3), DataParallel(net, ["cpu:3", "cpu:2"]), nn.ReLU())
    plain = nn.Sequential(outer[0], Net(), nn.ReLU())
    plain[1].load_state_dict(net.state_dict())
    outer.eval(), plain.eval()
    x = torch.randn(5, 3)
    out = outer(x)
    torch.testing.assert_close(out, plain(x))
    out.sum().backward()
    grad, outer[0].weight.grad = outer[0].weight.grad, None
    plain(x).sum().backward()
    torch.testing.assert_close(grad, outer[0].weight.grad)
    torch.testing.assert_close(net.linear.weight.grad, plain[1].linear.weight.grad)


@pytest.mark.cuda
@pytest.mark.behaviour(173)
def test_the_first_gpu_may_be_any(make_devices):
    """Nothing is made on GPUs that are not named, where there are any."""
    devices = make_devices(2)[::-1]
    unnamed = set(range(torch.cuda.device_count())) - {torch.device(d).index for d in devices}
    before = {i: torch.cuda.memory_reserved(i) for i in unnamed}
    model = DataParallel(Net().to(devices[0]), devices)
    model(torch.randn(4, 3, device=devices[0])).sum().backward()
    assert {i: torch.cuda.memory_reserved(i) for i in unnamed} == before


@pytest.mark.cuda
@pytest.mark.behaviour(173)
def test_a_wrapper_inside_of_a_wrapper_of_gpus(net, make_devices):
    devices = make_devices(2)
    inner = DataParallel(net.to(devices[0]), devices)
    outer = DataParallel(nn.Sequential(inner), devices)
    x = torch.randn(8, 3)
    if len(set(devices)) == 1:
        assert outer(x).shape == (8, 2)
    else:
        with pytest.raises(RuntimeError, match=f"found one of them on device: {devices[1]}"):
            outer(x)


@pytest.mark.behaviour(181)
def test_a_module_that_uses_no_input_runs_on_all_used_devices():
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.calls = []

        def forward(self, x):
            self.calls.append(len(x))
            return self.weight

    net = Ignores()
    out = DataParallel(net, virtual_devices(4))(torch.ones(5))
    assert sorted(net.calls) == [1, 2, 2] and out.tolist() == [1] * 6
    out.sum().backward()
    assert net.weight.grad.tolist() == [3, 3]


@pytest.mark.behaviour(182)
@pytest.mark.parametrize("n", [1, 3])
def test_a_module_without_tensors(n):
    x = torch.randn(7, 2, requires_grad=True)
    out = DataParallel(nn.ReLU(), virtual_devices(n))(x)
    assert torch.equal(out, x.relu())
    out.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


@pytest.mark.behaviour(10, 174)
def test_attributes_may_be_assigned(net):
    """Forward reads them each time, so the wrapper itself can be changed between two."""
    net.eval()
    model = DataParallel(net, virtual_devices(2))
    x = torch.randn(8, 3)
    calls = []
    net.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    for device_ids, shapes in [
        ([0, 1], [(4, 3)] * 2),
        ([0, 1, 2, 3], [(2, 3)] * 4),
        ([1], [(8, 3)]),
        ([1, 0], [(4, 3)] * 2),
        ([], [(8, 3)]),
    ]:
        model.device_ids = device_ids
        torch.testing.assert_close(model(x), net(x))
        assert calls[:-1] == shapes
        calls.clear()
    model.device_ids, model.module = [0, 1], nn.Flatten()
    for output_device in (1, "cpu", torch.device("cpu"), None):
        model.output_device = output_device
        assert torch.equal(model(x), x)
    model.dim = 1
    assert torch.equal(model(x), torch.cat([x[:, :2], x[:, 2:]], 1))
