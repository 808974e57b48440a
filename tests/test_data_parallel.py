"""Forward of the wrapper."""

import contextlib
import gc
import warnings

import pytest
import torch
from networks import Scaled
from notes import notes_of
from torch import nn
from torch.profiler import profile

from pyparallel.data_parallel import DataParallel
from pyparallel.devices import virtual_devices


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def by_chunks(net, x, n, **kwargs):
    return torch.cat([net(chunk, **kwargs) for chunk in x.chunk(n)])


@pytest.mark.behaviour(20, 28, 45)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_outputs_are_those_of_the_chunks(n, batch):
    net = Scaled().eval()
    x = torch.randn(batch, 3)
    model = DataParallel(net, virtual_devices(n))
    torch.testing.assert_close(model(x, scale=2.0), by_chunks(net, x, n, scale=2.0))
    torch.testing.assert_close(model(x=x), by_chunks(net, x, n))
    with torch.no_grad():
        torch.testing.assert_close(model(x), by_chunks(net, x, n))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), by_chunks(net, x, n))


def test_training_after_an_inference_forward():
    model = DataParallel(Scaled(), virtual_devices(2))
    with torch.inference_mode():
        model(torch.randn(4, 3))
    model(torch.randn(4, 3)).sum().backward()
    assert model.module.linear.weight.grad is not None


@pytest.mark.behaviour(29)
def test_an_empty_batch_runs_on_all_ranks():
    calls = []
    net = nn.Linear(3, 2)
    net.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    out = DataParallel(net, virtual_devices(3))(torch.empty(0, 3))
    assert out.shape == (0, 2) and calls == [0, 0, 0]
    out.sum().backward()
    assert torch.equal(net.weight.grad, torch.zeros(2, 3))


@pytest.mark.behaviour(21)
def test_without_arguments_the_first_device_runs_once():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.ones(2))

        def forward(self):
            return self.value * 2

    net = Constant()
    out = DataParallel(net, virtual_devices(3))()
    assert out.tolist() == [2, 2]
    out.sum().backward()
    assert net.value.grad.tolist() == [2, 2]


@pytest.mark.behaviour(22, 180)
def test_one_device_runs_the_module_itself():
    class Self(nn.Module):
        def forward(self, x):
            return self, x

    net = Self()
    module, x = DataParallel(net, ["cpu:0"])(torch.ones(2))
    assert module is net and x.tolist() == [1, 1]


def test_another_dimension():
    class Sum(nn.Module):
        def forward(self, x):
            return x * 2

    x = torch.arange(10.0).view(2, 5)
    assert torch.equal(DataParallel(Sum(), virtual_devices(3), dim=1)(x), x * 2)


@pytest.mark.behaviour(18)
def test_a_module_elsewhere_is_refused_in_torchs_words():
    model = DataParallel(nn.Linear(3, 2, device="meta"), virtual_devices(2))
    expected = (
        r"module must have its parameters and buffers on device cpu \(device_ids\[0\]\) "
        r"but found one of them on device: meta"
    )
    with pytest.raises(RuntimeError, match=expected):
        model(torch.ones(2, 3))


@pytest.mark.behaviour(62, 156)
def test_statistics_of_batch_norm_are_those_of_the_first_chunk():
    net, reference = Scaled(), Scaled()
    reference.load_state_dict(net.state_dict())
    x = torch.randn(8, 3)
    DataParallel(net, virtual_devices(2))(x)
    reference(x[:4])
    torch.testing.assert_close(net.norm.running_mean, reference.norm.running_mean)
    assert net.norm.num_batches_tracked == 1


@pytest.mark.behaviour(61, 75)
def test_what_forward_changes_is_forgotten_but_lists_are_shared():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(len(x))
            return x + self.calls

    net = Counter()
    model = DataParallel(net, virtual_devices(2))
    for _ in range(2):
        assert model(torch.zeros(3)).tolist() == [1, 1, 1]
    assert net.calls == 0 and net.seen == [2, 1, 2, 1]


@pytest.mark.behaviour(174, 175)
def test_every_change_of_the_module_is_seen_by_the_next_forward():
    net = Scaled().eval()
    model = DataParallel(net, virtual_devices(2))
    x = torch.randn(4, 3)

    def check():
        torch.testing.assert_close(model(x), by_chunks(net, x, 2))

    check()
    net.linear.weight.data = torch.randn(2, 3)
    check()
    net.linear.bias = nn.Parameter(torch.randn(2))
    check()
    net.linear = nn.Linear(3, 2, bias=False)
    check()
    net.norm.running_mean.add_(1)
    check()
    net.double()
    x = x.double()
    check()


def test_a_replica_that_fails_and_the_next_forward():
    class Picky(nn.Module):
        def forward(self, x):
            if (x < 0).any():
                raise ValueError("negative")
            return x

    model = DataParallel(Picky(), virtual_devices(3))
    with pytest.raises(ValueError, match="negative") as caught:
        model(torch.tensor([1.0, -1, 1]))
    assert notes_of(caught.value) == ["Caught ValueError in replica 1 on device 1."]
    assert model(torch.ones(3)).tolist() == [1, 1, 1]


def test_a_recorded_write_to_a_parameter_is_refused():
    class Writes(nn.Linear):
        def forward(self, x):
            self.weight.mul_(2)
            return super().forward(x)

    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        DataParallel(Writes(2, 2), virtual_devices(2))(torch.ones(2, 2))


@pytest.mark.behaviour(180)
def test_parameters_work_inside_forward():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            assert next(self.parameters()).device == x.device
            assert list(self.state_dict()) == ["linear.weight", "linear.bias"]
            return self.linear(x.to(next(self.parameters()).dtype))

    model = DataParallel(Inside(), virtual_devices(2))
    for context in (contextlib.nullcontext, torch.no_grad):
        with context():
            assert model(torch.ones(4, 2)).shape == (4, 2)


@pytest.mark.behaviour(57, 59)
def test_without_gradients_the_first_rank_has_the_parameters_themselves():
    net = nn.Linear(2, 2)
    same = []

    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = net

        def forward(self, x):
            same.append(self.linear.weight is net.weight)
            return x

    model = DataParallel(Look(), virtual_devices(2))
    with torch.no_grad():
        model(torch.ones(2))
    model(torch.ones(2))
    assert same == [True, False, False, False]


@pytest.mark.behaviour(25)
def test_hooks_of_the_wrapper_see_the_whole_batch():
    seen = []
    model = DataParallel(Scaled(), virtual_devices(2))
    model.register_forward_hook(lambda m, args, out: seen.append((len(args[0]), len(out))))
    model(torch.randn(4, 3))
    assert seen == [(4, 4)]


@pytest.mark.report("pytorch#60540", "pytorch#50170", "pytorch#125186", "pytorch#105682")
def test_autocast_reaches_the_replicas():
    model = DataParallel(nn.Linear(3, 2), virtual_devices(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(4, 3)).dtype == torch.bfloat16


@pytest.mark.behaviour(173)
def test_wrappers_nest():
    net = nn.Linear(3, 2)
    inner = DataParallel(net, virtual_devices(2))
    outer = DataParallel(nn.Sequential(inner, nn.ReLU()), virtual_devices(2))
    x = torch.randn(8, 3)
    out = outer(x)
    torch.testing.assert_close(out, net(x).relu())
    (grad,) = torch.autograd.grad(out.sum(), net.weight)
    torch.testing.assert_close(grad, torch.autograd.grad(net(x).relu().sum(), net.weight)[0])


@pytest.mark.behaviour(16)
def test_the_profiler_names_the_forward():
    model = DataParallel(Scaled(), virtual_devices(2))
    with profile() as profiler:
        model(torch.randn(4, 3))
    assert "DataParallel.forward" in {event.key for event in profiler.key_averages()}


def test_no_reference_cycles():
    model = DataParallel(Scaled(), virtual_devices(3))
    while gc.collect():  # what torch.compile left in other tests takes several rounds
        pass
    gc.disable()
    try:
        model(torch.randn(6, 3)).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.behaviour(99, 185)
@pytest.mark.report(
    "pytorch#69200", "pytorch#12277", "pytorch#4391", "pytorch-scripts#19", "SelfPAB#1"
)
def test_nothing_warns():
    model = DataParallel(Scaled(), virtual_devices(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 3)).sum().backward()
