"""Tensors of replicas as plain attributes: always equal to the entries, and never in copies."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pyparallel.mirror import MirroredEntries, mirror, without_mirror


@pytest.fixture
def layer():
    module = nn.BatchNorm1d(3)
    mirror(module)
    return module


def agrees(module):
    entries = {**module._parameters, **module._buffers}
    plain = {k: v for k, v in module.__dict__.items() if isinstance(v, torch.Tensor) or v is None}
    return all(plain[name] is value for name, value in entries.items()) and all(
        name in entries for name, value in plain.items() if value is not None
    )


def test_tensors_are_attributes(layer):
    assert layer.__dict__["weight"] is layer._parameters["weight"] is layer.weight
    assert layer.__dict__["running_mean"] is layer._buffers["running_mean"]
    assert agrees(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize(
    "write",
    [
        lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(3))),
        lambda m: setattr(m, "weight", None),
        lambda m: delattr(m, "bias"),
        lambda m: setattr(m, "running_mean", torch.ones(3)),
        lambda m: delattr(m, "running_mean"),
        lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(1))),
        lambda m: m.register_buffer("extra", torch.ones(1)),
        lambda m: m._parameters.update(weight=None, bias=None),
        lambda m: m._parameters.update([("weight", None)]),
        lambda m: m._parameters.__ior__({"weight": None}),
        lambda m: m._parameters.pop("weight"),
        lambda m: m._parameters.popitem(),
        lambda m: m._buffers.clear(),
        lambda m: m._parameters.setdefault("extra", nn.Parameter(torch.ones(1))),
        lambda m: m._parameters.setdefault("weight"),
        lambda m: m.double(),
        lambda m: torch.func.functional_call(m, {"weight": torch.ones(3)}, torch.ones(2, 3)),
    ],
)
def test_every_write_reaches_both(write, layer):
    write(layer)
    assert agrees(layer)


def test_a_functional_call_uses_the_weights_given():
    module = nn.Linear(2, 2)
    mirror(module)
    weights = {"weight": torch.eye(2), "bias": torch.ones(2)}
    assert torch.func.functional_call(module, weights, torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_ordinary(duplicate, layer):
    other = duplicate(layer)
    assert type(other._parameters) is type(other._buffers) is dict
    assert not {"weight", "running_mean", "__getstate__"} & other.__dict__.keys()
    assert torch.equal(other.weight, layer.weight) and other.weight is not layer.weight
    other.double()
    assert other.weight.dtype is torch.float64
    assert agrees(layer)


def test_attributes_without_the_mirror(layer):
    assert without_mirror(layer).keys() == nn.BatchNorm1d(3).__dict__.keys()
    module = nn.Linear(1, 1)
    assert without_mirror(module) is module.__dict__


def test_modules_of_users_keep_as_they_are():
    class Mine(nn.Linear):
        pass

    module = Mine(1, 1)
    mirror(module)
    assert type(module._parameters) is dict
    module = nn.ReLU()
    mirror(module)
    assert type(module._parameters) is dict


def test_entries_that_outlive_their_module(layer):
    entries = layer._parameters
    del layer
    entries["weight"] = None
    assert isinstance(entries, MirroredEntries) and entries["weight"] is None
