"""Gradients as users reported them: several outputs, functions that are gone, double backward."""

import gc

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import virtual_devices


class Twins(nn.Module):
    """Returns several outputs, of which a loss may use one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return {"hidden": hidden, "outs": (self.second(hidden), hidden.pow(2).sum(1, keepdim=True))}


def penalty(model, x):
    """The gradient penalty of a critic; nothing of it stays but the loss."""
    x = x.detach().requires_grad_()
    outs = model(x)["outs"]
    (grad,) = torch.autograd.grad(outs[0].sum() + outs[1].sum(), x, create_graph=True)
    return (grad.norm(2, dim=1) - 1).pow(2).sum()


def only_one(model, x):
    return model(x)["outs"][1].sum()


def twice(model, x):
    return (model(x)["hidden"] * model(2 * x)["hidden"]).sum()


@pytest.mark.report(
    "pytorch#2467",
    "pytorch#2736",
    "pytorch#16532",
    "pytorch#19024",
    "pytorch#15716",
    "pytorch#35672",
)
@pytest.mark.parametrize("loss_of", [penalty, only_one, twice])
def test_gradients_after_the_function_that_made_the_graph_is_gone(loss_of):
    torch.manual_seed(0)
    model, x = Twins().double(), torch.randn(7, 3, dtype=torch.float64)
    dp = pyparallel.DataParallel(model, virtual_devices(3))
    for _ in range(3):
        loss = loss_of(dp, x)
        gc.collect()
        model.zero_grad()
        loss.backward()
        ours = [p.grad for p in model.parameters()]
        model.zero_grad()
        expected = loss_of(model, x)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for grad, parameter in zip(ours, model.parameters(), strict=True):
            assert (grad is None) == (parameter.grad is None)
            if grad is not None:
                torch.testing.assert_close(grad, parameter.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
