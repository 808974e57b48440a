"""Replicas: their tensors, attributes, kinds of modules, and what stays in the original."""

import copy
import functools
import gc
import io
import warnings

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from pyparallel.replicate import check_not_modified, replicate

pytestmark = pytest.mark.usefixtures("on_the_first_device")

N = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 3, bias=False)
        self.register_parameter("nothing", None)
        self.register_buffer("empty", None)
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.absent = None

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x)))) * self.scale


@pytest.mark.behaviour(70, 71)
@pytest.mark.report("yolov5#475")
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_each_rank_has_its_own_equal_tensors(n, detach, replicas_of):
    net = Net()
    replicas = replicas_of(net, n, detach=detach)
    assert len(replicas) == n
    addresses = set()
    for replica in replicas:
        assert type(replica) is Net
        assert replica.nothing is None and replica.empty is None
        tensors = [*replica.parameters(), *replica.buffers()]
        originals = [*net.parameters(), *net.buffers()]
        for tensor, original in zip(tensors, originals, strict=True):
            assert torch.equal(tensor, original)
        addresses.update(tensor.data_ptr() for tensor in tensors)
    assert len(addresses) == n * len(originals)
    assert {tensor.data_ptr() for tensor in originals} <= addresses


def test_parameters_are_real_inside_a_replica(replicas_of):
    net = Net()
    net.first.weight.tag = "kept"
    for replica in replicas_of(net):
        assert [name for name, _ in replica.named_parameters()] == [
            name for name, _ in net.named_parameters()
        ]
        assert replica.state_dict().keys() == net.state_dict().keys()
        assert next(replica.parameters()).device == torch.device("cpu")
        for parameter in replica.parameters():
            assert type(parameter) is nn.Parameter
            assert parameter.requires_grad and not parameter.is_leaf
        assert replica.first.weight.tag == "kept"
        inner = copy.deepcopy(replica.first)
        assert torch.equal(inner.weight, net.first.weight)


@pytest.mark.behaviour(60)
def test_rank_0_holds_the_buffers_and_frozen_parameters_themselves(replicas_of):
    net = Net()
    net.second.weight.requires_grad_(False)
    first, *others = replicas_of(net)
    assert first.norm.running_mean is net.norm.running_mean
    assert first.second.weight is net.second.weight
    for replica in others:
        assert replica.norm.running_mean is not net.norm.running_mean
        assert not replica.second.weight.requires_grad
        assert type(replica.second.weight) is nn.Parameter


@pytest.mark.behaviour(59)
def test_detached_replicas_of_rank_0_hold_the_parameters_themselves(replicas_of):
    net = Net()
    first, *others = replicas_of(net, detach=True)
    assert all(a is b for a, b in zip(first.parameters(), net.parameters(), strict=True))
    for replica in others:
        assert all(p.grad_fn is None for p in replica.parameters())


@pytest.mark.behaviour(69)
def test_shared_modules_and_tied_parameters_stay_shared(replicas_of):
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    net.append(net[0])
    net[2].weight = net[0].weight
    for replica in replicas_of(net):
        assert replica[3] is replica[0]
        assert replica[2].weight is replica[0].weight
        assert len(list(replica.parameters())) == 3


@pytest.mark.behaviour(162)
def test_buffers_that_require_a_gradient_get_one(replicas_of):
    net = nn.Module()
    net.register_buffer("table", torch.ones(2, requires_grad=True))
    for rank, replica in enumerate(replicas_of(net)):
        assert type(replica.table) is torch.Tensor
        (replica.table.sum() * (rank + 1)).backward(retain_graph=True)
    assert torch.equal(net.table.grad, torch.full((2,), 6.0))


def test_parameters_override_of_the_user_hides_nothing(replicas_of):
    class Head(Net):
        def parameters(self, recurse=True):
            return self.second.parameters(recurse)

    net = Head()
    for rank, replica in enumerate(replicas_of(net)):
        assert (replica.first.weight is net.first.weight) is False
        assert replica.first.weight.data_ptr() != net.first.weight.data_ptr() or rank == 0


@pytest.mark.behaviour(74)
@pytest.mark.report("peft#3043")
def test_attributes_that_lead_into_the_tree_lead_into_the_replica(replicas_of):
    class Wired(Net):
        def __init__(self):
            super().__init__()
            self.layers = [self.first, self.second]
            self.table = {"norm": self.norm}
            self.act = functools.partial(self.scaled, factor=2.0)
            self.weights = (self.first.weight,)
            self.cache = []

        def scaled(self, x, factor):
            return self.scale * x * factor

    net = Wired()
    net.forward = net.act
    for rank, replica in enumerate(replicas_of(net)):
        assert replica.layers[0] is replica.first and replica.layers[1] is replica.second
        assert replica.table["norm"] is replica.norm
        assert replica.weights[0] is replica.first.weight
        assert replica.cache is net.cache
        replica.scale = torch.full((3,), float(rank))
        assert torch.equal(replica(torch.ones(3)), torch.full((3,), 2.0 * rank))
    assert net.layers[0] is net.first


@pytest.mark.behaviour(82)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_rnn_weights_are_the_replicas_own(kind, replicas_of):
    net = kind(3, 4, num_layers=2, bidirectional=True)
    for replica in replicas_of(net):
        names = dict(replica.named_parameters())
        for flat, name in zip(replica._flat_weights, replica._flat_weights_names, strict=True):
            assert flat is names[name]
        assert not replica._weights_have_changed()
    assert all(a is b for a, b in zip(net._flat_weights, net.parameters(), strict=True))


def test_zero_grad_warns_once_in_torchs_words(replicas_of):
    for replica in replicas_of(Net()):
        for module in (replica, replica.first):
            with pytest.warns(UserWarning) as caught:
                module.zero_grad()
            assert len(caught) == 1
            assert "has no effect" in str(caught[0].message)


@pytest.mark.behaviour(91)
def test_a_replica_can_be_saved(replicas_of):
    buffer = io.BytesIO()
    torch.save(replicas_of(nn.Linear(2, 2), detach=True), buffer)
    buffer.seek(0)
    assert len(torch.load(buffer, weights_only=False)) == N


@pytest.mark.behaviour(92)
def test_no_reference_cycles(replicas_of):
    net = Net()
    gc.collect()
    gc.disable()
    try:
        replicas_of(net)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.behaviour(60, 62)
def test_in_place_writes_stay_on_rank_0_only(replicas_of):
    net = Net()
    for rank, replica in enumerate(replicas_of(net)):
        replica.scale.add_(rank + 1)
        with torch.no_grad():
            replica.first.bias.fill_(rank + 5)
        check_not_modified(replica)
    assert torch.equal(net.scale, torch.full((3,), 2.0))
    assert torch.equal(net.first.bias, torch.full((4,), 5.0))


def test_a_recorded_write_to_a_parameter_is_refused(replicas_of):
    replica = replicas_of(Net())[0]
    replica.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"leaf Variable.*'first.weight'"):
        check_not_modified(replica)


@pytest.mark.behaviour(72)
def test_parameter_lists_and_dicts(replicas_of):
    net = nn.Module()
    net.items = nn.ParameterList([torch.ones(2), torch.ones(3)])
    net.table = nn.ParameterDict({"a": torch.ones(2)})
    for replica in replicas_of(net):
        assert len(replica.items) == 2 and replica.items[1].shape == (3,)
        assert "a" in replica.table and replica.table["a"] is not net.table["a"]
        assert len(list(replica.parameters())) == 3


@pytest.mark.behaviour(86)
@pytest.mark.report("pytorch#11476")
@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        pytest.param(weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        spectral_norm,
    ],
)
def test_parametrized_modules_compute_and_train(wrap, replicas_of):
    net, reference = (wrap(nn.Linear(4, 4)).eval() for _ in range(2))
    reference.load_state_dict(net.state_dict())
    x = torch.randn(2, 4)
    for replica in replicas_of(net):
        replica(x).sum().backward(retain_graph=True)
    for _ in range(N):
        reference(x).sum().backward()
    for parameter, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.behaviour(85)
def test_fx_graph_module(replicas_of):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 3))
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.block(x) * self.gain

    net = fx.symbolic_trace(Scaled())
    x = torch.randn(2, 3)
    for replica in replicas_of(net):
        assert replica._is_replica
        assert replica.gain is not net.gain
        assert torch.equal(replica(x), net(x))
        replica(x).sum().backward(retain_graph=True)
    assert net.gain.grad is not None and net.block.get_submodule("0").weight.grad is not None


@pytest.mark.behaviour(84)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "compiler", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 3))]
)
def test_script_modules(compiler, replicas_of):
    net = nn.Sequential(compiler(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())))
    x = torch.randn(2, 3)
    for replica in replicas_of(net):
        assert torch.allclose(replica(x), net(x))
        replica(x).sum().backward(retain_graph=True)
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.behaviour(84)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_python_modules_below_a_script_module_are_refused(replicas_of):
    class Holder(torch.jit.ScriptModule):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

    holder = Holder()
    object.__setattr__(holder, "modules", lambda: iter([holder, nn.Linear(2, 2)]))
    with pytest.raises(RuntimeError, match="python modules are children of ScriptModule"):
        replicas_of(nn.Sequential(holder))


def test_no_devices():
    assert replicate(nn.Linear(2, 2), []) == []


@pytest.mark.behaviour(88)
@pytest.mark.report("algorithmic-efficiency#754")
def test_a_compiled_module_keeps_its_parameters_and_runs_the_replicas(replicas_of):
    module = nn.Linear(3, 3)
    names = [name for name, _ in module.named_parameters()]
    compiled = torch.compile(module, backend="eager")
    x = torch.randn(2, 3)
    replicas = replicas_of(compiled)
    for rank, replica in enumerate(replicas):
        with torch.no_grad():
            replica._orig_mod.bias.fill_(rank)
        assert torch.allclose(replica(x), x @ module.weight.T + rank, atol=1e-6)
    assert [name for name, _ in module.named_parameters()] == names
    assert compiled._orig_mod is module


@pytest.mark.behaviour(89)
def test_compile_in_place_runs_the_replicas(replicas_of):
    module = nn.Linear(3, 3)
    module.compile(backend="eager")
    x = torch.randn(2, 3)
    for rank, replica in enumerate(replicas_of(module)):
        with torch.no_grad():
            replica.bias.fill_(rank)
        assert replica._compiled_call_impl is not None
        assert torch.allclose(replica(x), x @ module.weight.T + rank, atol=1e-6)


def test_a_replica_warns_of_nothing_else(replicas_of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for replica in replicas_of(Net()):
            list(replica.named_parameters())
            replica.state_dict()
            replica(torch.randn(2, 3)).sum().backward(retain_graph=True)
