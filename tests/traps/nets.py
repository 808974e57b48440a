"""The net of most tests of traps, and comparisons."""

import torch
from torch import nn

N = 3  # ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def compare_grads(model, net):
    for a, b in zip(model.module.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            close(a.grad, b.grad)


def other_data(module):
    for p in module.parameters():
        p.data = p.data + 1
