"""What the tests of the engine have in common."""

import torch
from torch import nn

N = 3


class Norm(nn.BatchNorm1d):
    eps = 0.5  # where a module has no such attribute


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = Norm(4)
        self.second = nn.Linear(4, 2)
        self.factor = 1.0

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x)))) * self.factor


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)
