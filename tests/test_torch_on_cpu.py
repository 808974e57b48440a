"""The harness itself: torch's code runs, splits, copies, sums and leaves no trace."""

import importlib
import warnings

import pytest
import torch
from torch import nn
from torch_on_cpu import TorchDataParallel, torch_data_parallel, torch_on_cpu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows += len(x)
        return self.linear(x)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("in_turn", [True, False])
def test_values_gradients_and_buffers(n, in_turn):
    net = Net()
    model = TorchDataParallel(net, range(n), in_turn=in_turn)
    x = torch.randn(7, 3, requires_grad=True)
    y = model(x)
    torch.testing.assert_close(y, net.linear(x))
    assert net.rows == -(-7 // n)
    y.square().sum().backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    expected = torch.autograd.grad(net.linear(x).square().sum(), [x, *net.parameters()])
    torch.testing.assert_close(found, list(expected))


def test_copies_are_torchs():
    """They hold no parameters, which only torch's code brings about."""

    class Looks(Net):
        def forward(self, x):
            return torch.full((len(x),), len(list(self.parameters())))

    assert TorchDataParallel(Looks(), range(2))(torch.ones(4, 3)).tolist() == [0] * 4


def test_errors_and_warnings_are_torchs():
    class Fails(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                raise ValueError("here")
            return x.sum()

    model = TorchDataParallel(Fails(), range(2))
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        assert model(torch.zeros(4)).shape == (2,)
    with pytest.raises(ValueError, match="Caught ValueError in replica 1 on device 1"):
        model(torch.tensor([0, 0, 0, 1]))
    with pytest.raises(RuntimeError, match="chunk expects at least a 1-dimensional tensor"):
        model(torch.tensor(0))


def test_as_a_function():
    net = Net()
    x = torch.randn(7, 3)
    torch.testing.assert_close(torch_data_parallel(net, x, range(3)), net.linear(x))


def test_nothing_stays_replaced():
    names = ["data_parallel", "parallel_apply", "replicate", "scatter_gather"]
    modules = [importlib.import_module(f"torch.nn.parallel.{name}") for name in names]
    before = [dict(vars(module)) for module in modules]
    with warnings.catch_warnings(), torch_on_cpu():
        assert all(vars(m) != b for m, b in zip(modules, before, strict=True))
    assert all(vars(m) == b for m, b in zip(modules, before, strict=True))
