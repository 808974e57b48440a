"""Ways to get silently wrong gradients, each of which the step engine avoids.

Every test fails if the remedy named in its comment is taken out. A2 is tested with A3, and A10 in
test_dispatch.py.
"""

import copy

import pytest
import torch
from nets import N, Net

from pyparallel.data_parallel import DataParallel


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def wrap(make_devices):
    return lambda net, n=N, **options: DataParallel(net, make_devices(n), **options)


@pytest.fixture
def pair(wrap):
    """A net, the wrapper of a copy of it, and an input."""
    net = Net().double()
    return net, wrap(copy.deepcopy(net)), torch.randn(7, 3, dtype=torch.float64)
