"""Outputs as users reported them: losses on every device, numbers, objects, balance of memory."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyparallel
from pyparallel import virtual_devices


class WithLoss(nn.Module):
    """The loss is computed where the logits are, so only numbers travel to the first device."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 5)

    def forward(self, x, y):
        loss = F.cross_entropy(self.net(x), y, reduction="sum")
        return loss.reshape(1), torch.tensor([len(y)])


@pytest.mark.report(
    "pytorch#1893",
    "transformers#279",
    "RAFT#33",
    "mmf#190",
    "DPR#104",
    "EpipolarPose#22",
    "awd-lstm-lm#38",
    "calibrated-backprojection#5",
    "DeepSDF#20",
    "singleshotpose#52",
    "DenseMatchingBenchmark#10",
    "transformers#14128",
)
@pytest.mark.parametrize("rows", [8, 7, 5])
def test_a_loss_inside_forward_is_that_of_one_device(rows):
    torch.manual_seed(0)
    model, x, y = WithLoss(), torch.randn(rows, 3), torch.arange(rows) % 5
    dp = pyparallel.DataParallel(model, virtual_devices(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums, counts = dp(x, y)
    loss = sums.sum() / counts.sum()
    expected = F.cross_entropy(model.net(x), y)
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, [model.net.weight])
    torch.testing.assert_close(grad, torch.autograd.grad(expected, [model.net.weight])[0])


class Ungathered(pyparallel.DataParallel):
    """Leaves the outputs where they are: one for each device."""

    def gather(self, outputs, output_device):
        return outputs


@pytest.mark.report("PyTorch-Encoding#19", "PyTorch-Encoding#54", "PyTorch-Encoding#116")
def test_a_subclass_leaves_outputs_on_their_devices():
    model = nn.Linear(3, 5)
    x, y = torch.randn(6, 3), torch.arange(6) % 5
    outputs = Ungathered(model, virtual_devices(3))(x)
    assert [tuple(output.shape) for output in outputs] == [(2, 5)] * 3
    losses = [
        F.cross_entropy(out, part, reduction="sum")
        for out, part in zip(outputs, y.chunk(3), strict=True)
    ]
    sum(losses).backward()
    weight = model.weight.grad.clone()
    model.zero_grad()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    torch.testing.assert_close(weight, model.weight.grad)


@pytest.mark.report(
    "pytorch#7956",
    "pytorch#6983",
    "pytorch#9811",
    "lightning#249",
    "lightning#5613",
    "FairMOT#278",
    "1-stage-wseg#14",
    "lxmert#17",
    "PRGC#17",
    "GPT2-Chinese#117",
    "trl#7018",
)
def test_the_warning_of_scalars_can_be_filtered_by_its_class():
    class Loss(nn.Module):
        def forward(self, x):
            return x.mean()

    dp = pyparallel.DataParallel(Loss(), virtual_devices(3))
    x = torch.arange(6.0)
    text = (
        "Was asked to gather along dimension 0, but all input tensors were scalars; will instead "
        "unsqueeze and return a vector."
    )
    with pytest.warns(pyparallel.ScalarGatherWarning) as caught:
        assert dp(x).tolist() == [0.5, 2.5, 4.5]
    assert [str(w.message) for w in caught] == [text]
    assert issubclass(pyparallel.ScalarGatherWarning, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", pyparallel.ScalarGatherWarning)
        assert dp(x).tolist() == [0.5, 2.5, 4.5]


@pytest.mark.report(
    "pytorch#15994",
    "pytorch#94699",
    "lightning#2507",
    "kinematic3d#4",
    "numnet_plus#4",
    "CenterNet#403",
    "PointFlow#3",
    "GaTector#7",
    "MVP_Benchmark#9",
)
def test_numbers_and_strings_beside_tensors():
    class Statistics(nn.Module):
        def forward(self, x):
            return {"out": x, "rows": len(x), "mean": float(x.mean()), "name": "net", "none": None}

    out = pyparallel.DataParallel(Statistics(), virtual_devices(2))(torch.arange(3.0))
    assert out["out"].tolist() == [0, 1, 2]
    assert out["rows"].tolist() == [2, 1] and out["mean"].tolist() == [0.5, 2.0]
    assert out["name"] == ["net", "net"] and out["none"] is None


class Cache:
    """As a cache of keys and values: iterable, made from two things, not from an iterable."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def __iter__(self):
        return iter((self.keys, self.values))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    cache: object = None


@pytest.mark.report("transformers#40008", "transformers#36212", "pytorch#41327")
def test_objects_of_unknown_classes_are_returned_as_they_are():
    class Model(nn.Module):
        def forward(self, x):
            return Output(x, Cache(x, x + 1))

    out = pyparallel.DataParallel(Model(), virtual_devices(2))(torch.arange(4.0))
    assert type(out) is Output and out.logits.tolist() == [0, 1, 2, 3]
    assert [type(cache) for cache in out.cache] == [Cache, Cache]
    assert [cache.values.tolist() for cache in out.cache] == [[1, 2], [3, 4]]


@pytest.mark.report("pytorch#1051")
def test_a_subclass_merges_statistics_of_batch_norm():
    """By default the first device's stay, as in torch."""

    class Merged(pyparallel.DataParallel):
        def parallel_apply(self, replicas, inputs, kwargs):
            outputs = super().parallel_apply(replicas, inputs, kwargs)
            for own, *others in zip(*(r.buffers() for r in replicas), strict=True):
                if own.is_floating_point():
                    own.copy_(torch.stack([own, *(o.to(own.device) for o in others)]).mean(0))
            return outputs

    net = nn.BatchNorm1d(2, momentum=1.0)
    x = torch.randn(8, 2)
    Merged(net, virtual_devices(4))(x)
    torch.testing.assert_close(net.running_mean, x.mean(0))
