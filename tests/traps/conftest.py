"""Ways to get silently wrong gradients, each of which the step engine avoids.

Every test fails if the remedy named in its comment is taken out. A2 is tested with A3, and A10 in
test_dispatch.py.
"""

import copy

import pytest
import torch
from networks import TwoLayers


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def pair(wrap):
    """A net, the wrapper of a copy of it, and an input."""
    net = TwoLayers().double()
    return net, wrap(copy.deepcopy(net)), torch.randn(7, 3, dtype=torch.float64)
