"""A network, its wrapper and its training, for tests of tools of torch."""

import copy

import torch
from torch import nn

from pyparallel import DataParallel


class Second(nn.Linear):
    def forward(self, x):  # what torch defines itself, torch compiles only as a part of something
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.second = Second(4, 2, dtype=torch.float64)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def parameters(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def gradients(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def train(model, x, steps=3, make_optimizer=None):
    """Returns the weights after a few steps; the batch gets shorter from step to step."""
    make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        model(x[step:]).square().sum().backward()
        optimizer.step()
    return parameters(model)


def make_pair(devices, module=Net, rows=7):
    """Returns a bare module, the same module wrapped, and a batch."""
    torch.manual_seed(0)
    net = module()
    home = torch.device(devices[0].replace("cpu:0", "cpu"))
    wrapped = DataParallel(copy.deepcopy(net).to(home), devices)
    return net.to(home), wrapped, torch.randn(rows, 3, dtype=torch.float64, device=home)
