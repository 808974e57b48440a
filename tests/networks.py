"""Networks that several files of tests use."""

import torch
from torch import nn


class Scaled(nn.Module):
    """A layer and a norm, and an argument that is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x, scale=1.0):
        return self.norm(self.linear(x)) * scale


class TwoLayers(nn.Module):
    """Treats each sample alone."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Recording(nn.Module):
    """A layer that notes the dtype of what it computes."""

    seen: list = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        y = self.linear(x)
        self.seen.append(y.dtype)
        return y
