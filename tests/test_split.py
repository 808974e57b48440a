"""split="chunk" and split="balanced": how many rows each device gets."""

import copy
import io
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel.chunk_sizes import chunk_sizes


class Pair(NamedTuple):
    x: object
    y: object


class Rows(nn.Module):
    """Returns its input, and how many rows each device had."""

    def __init__(self, dim=0):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x * 1, x.size(self.dim)


def rows(x, devices, **options):
    y, sizes = pyparallel.DataParallel(Rows(options.get("dim", 0)), devices, **options)(x)
    assert torch.equal(y.cpu(), x)
    return sizes if isinstance(sizes, int) else sizes.tolist()


@pytest.mark.behaviour(28)
@pytest.mark.parametrize(
    "size, chunk, balanced",
    [
        (0, [0, 0, 0, 0], [0, 0, 0, 0]),
        (1, [1], [1]),
        (3, [1, 1, 1], [1, 1, 1]),
        (4, [1, 1, 1, 1], [1, 1, 1, 1]),
        (5, [2, 2, 1], [2, 1, 1, 1]),
        (9, [3, 3, 3], [3, 2, 2, 2]),
        (10, [3, 3, 3, 1], [3, 3, 2, 2]),
        (11, [3, 3, 3, 2], [3, 3, 3, 2]),
    ],
)
def test_sizes_on_four_devices(make_devices, size, chunk, balanced):
    assert chunk_sizes(size, 4) == chunk_sizes(size, 4, "chunk") == chunk
    assert chunk_sizes(size, 4, "balanced") == balanced
    x = torch.arange(size * 3.0).view(size, 3)
    assert rows(x, make_devices(4)) == chunk
    assert rows(x, make_devices(4), split="chunk") == chunk
    assert rows(x, make_devices(4), split="balanced") == balanced


def test_balanced_sizes_are_balanced():
    for nranks in range(1, 17):
        for size in range(1, 200):
            sizes = chunk_sizes(size, nranks, "balanced")
            assert sum(sizes) == size and len(sizes) == min(size, nranks)
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_along_any_dimension(make_devices, dim, channels_last):
    x = torch.arange(5 * 5 * 5 * 5.0).view(5, 5, 5, 5)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    assert rows(x, make_devices(4), dim=dim, split="balanced") == [2, 1, 1, 1]


def test_containers_and_keywords(make_devices):
    class Net(nn.Module):
        def forward(self, pair, flag, *, extra):
            assert flag == "flag" and pair.y["same"].shape[0] == extra[0].shape[0]
            return pair.x + pair.y["same"] + extra[0]

    model = pyparallel.DataParallel(Net(), make_devices(4), split="balanced")
    x = torch.arange(9.0)
    y = model(Pair(x, {"same": 10 * x}), "flag", extra=[100 * x])
    assert torch.equal(y.cpu(), 111 * x)


def test_sizes_that_only_balanced_can_split_alike(make_devices):
    class Sums(nn.Module):
        def forward(self, x, y):
            return (x.sum() + y.sum()).reshape(1)

    x, y = torch.arange(4.0), torch.arange(5.0)
    with pytest.raises(ValueError, match=r"sizes \[4, 5\] .* on 4 devices: \[4, 3\]"):
        pyparallel.DataParallel(Sums(), make_devices(4))(x, y)
    model = pyparallel.DataParallel(Sums(), make_devices(4), split="balanced")
    assert model(x, y).tolist() == [0 + 0 + 1, 1 + 2, 2 + 3, 3 + 4]
    with pytest.raises(ValueError, match=r"sizes \[3, 5\] .* on 4 devices: \[3, 4\]"):
        model(x[:3], y)


def test_gradients(make_devices):
    net = nn.Linear(3, 2).double()
    net.to(make_devices(4)[0].split(":")[0])
    model = pyparallel.DataParallel(copy.deepcopy(net), make_devices(4), split="balanced")
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    found, x.grad = x.grad, None
    net(x.to(net.weight.device)).square().sum().backward()
    torch.testing.assert_close(found, x.grad)
    torch.testing.assert_close(model.module.weight.grad, net.weight.grad)


@pytest.mark.parametrize("device_count", [0, 1, 2])
def test_unknown_rules_are_refused(make_devices, device_count):
    message = "split must be 'chunk' or 'balanced', but is 'even'"
    with pytest.raises(ValueError, match=message):
        pyparallel.DataParallel(Rows(), make_devices(device_count), split="even")
    with pytest.raises(ValueError, match=message):
        pyparallel.data_parallel(Rows(), torch.ones(4), make_devices(device_count), split="even")
    with pytest.raises(ValueError, match="but is None"):
        pyparallel.DataParallel(Rows(), make_devices(device_count), split=None)


def test_as_a_function(make_devices):
    x = torch.arange(9.0)
    for split, expected in ((None, [3, 3, 3]), ("balanced", [3, 2, 2, 2])):
        options = {} if split is None else {"split": split}
        y, sizes = pyparallel.data_parallel(Rows(), x, make_devices(4), **options)
        assert torch.equal(y.cpu(), x) and sizes.tolist() == expected


def test_an_overridden_scatter_keeps_torchs_signature(make_devices):
    class Wrapper(pyparallel.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            assert len(device_ids) == 4
            return super().scatter((inputs[0] + 1,), kwargs, device_ids)

    y, sizes = Wrapper(Rows(), make_devices(4), split="balanced")(torch.arange(9.0))
    assert torch.equal(y.cpu(), torch.arange(9.0) + 1) and sizes.tolist() == [3, 2, 2, 2]


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _saved, "pickle"])
def test_copies_keep_the_rule(make_devices, copied):
    model = pyparallel.DataParallel(Rows(), make_devices(4), split="balanced")
    model(torch.ones(4))  # with an engine
    other = pickle.loads(pickle.dumps(model)) if copied == "pickle" else copied(model)
    assert other.split == "balanced"
    assert other(torch.ones(9))[1].tolist() == [3, 2, 2, 2]


def test_the_rule_may_change_between_forwards(make_devices):
    model = pyparallel.DataParallel(Rows(), make_devices(4))
    assert model(torch.ones(9))[1].tolist() == [3, 3, 3]
    model.split = "balanced"
    assert model(torch.ones(9))[1].tolist() == [3, 2, 2, 2]
