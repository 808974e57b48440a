"""Replicas of parameters and buffers of special classes, or without values to copy."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("on_the_first_device")


@pytest.mark.behaviour(83)
def test_lazy_modules_are_refused_in_torchs_words(replicas_of):
    text = "Attempted to use an uninitialized parameter in DataParallel: '{}' has no shape yet"
    for lazy, name in (
        (nn.LazyLinear(3), "1.weight"),
        (nn.LazyBatchNorm1d(affine=False), "1.running_mean"),
    ):
        with pytest.raises(ValueError, match=text.format(name)):
            replicas_of(nn.Sequential(nn.Linear(2, 2), lazy))


class Tagged(nn.Parameter):
    def __new__(cls, data, tag):
        self = super().__new__(cls, data)
        self.tag = tag
        return self


class OwnTensor(torch.Tensor):
    pass


class Wrapped(torch.Tensor):
    """Keeps its data in another tensor, as quantized weights do."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data_elsewhere = data

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Wrapped(args[0].data_elsewhere)
        raise NotImplementedError(function)


def with_tag(tensor):
    tensor.tag = "mine"
    return tensor


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize(
    "kind, make",
    [
        ("parameter", lambda: Tagged(torch.ones(2), "mine")),
        ("parameter", lambda: with_tag(nn.Parameter(torch.ones(2)))),
        ("parameter", lambda: with_tag(nn.Parameter(torch.ones(2).as_subclass(OwnTensor)))),
        ("buffer", lambda: with_tag(torch.ones(2))),
        ("buffer", lambda: with_tag(torch.ones(2).as_subclass(OwnTensor))),
        ("buffer", lambda: with_tag(nn.Buffer(torch.ones(2)))),
        ("buffer", lambda: with_tag(nn.Parameter(torch.ones(2), requires_grad=False))),
    ],
)
def test_classes_and_attributes_of_tensors_are_kept(kind, make, detach, replicas_of):
    tensor = make()
    module = nn.Module()
    if kind == "parameter":
        module.register_parameter("own", tensor)
    else:
        module.register_buffer("own", tensor)
    for replica in replicas_of(module, detach=detach):
        assert type(replica.own) is type(tensor) and replica.own.tag == "mine"
        for base in (nn.Parameter, nn.Buffer):
            assert isinstance(replica.own, base) == isinstance(tensor, base)


def test_tensors_whose_data_is_elsewhere_are_refused_by_name(replicas_of):
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].weight = nn.Parameter(Wrapped(torch.ones(2, 2)), requires_grad=False)
    with pytest.raises(TypeError, match="cannot copy '0.weight' to other devices: a Wrapped keeps"):
        replicas_of(net)
