"""Batches as users reported them: short, uneven, with flags, lists, masks and weights."""

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import virtual_devices


class Flagged(nn.Module):
    def forward(self, x, flag, scale=1.0):
        assert flag is True
        return x * scale


@pytest.mark.report("pytorch#16432", "pytorch#15161", "pytorch#52260")
@pytest.mark.parametrize("n, rows", [(4, 3), (4, 9), (7, 36), (8, 1)])
@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_a_flag_beside_fewer_chunks_than_devices(n, rows, scale):
    x = torch.arange(2.0 * rows).view(rows, 2)
    dp = pyparallel.DataParallel(Flagged(), virtual_devices(n))
    assert torch.equal(dp(x, flag=True, scale=scale), 2 * x)
    assert torch.equal(dp(x, True, scale=scale), 2 * x)


@pytest.mark.report(
    "pytorch#9226",
    "pytorch#5039",
    "nnUNet#677",
    "erfnet_pytorch#2",
    "yolov3#1355",
    "pytorch-NetVlad#13",
    "end2end-asr#28",
    "ROMP#335",
    "vq-vae-2#7",
    "ReMix#4",
    "frozen-in-time#23",
)
@pytest.mark.parametrize("split", ["chunk", "balanced"])
def test_batches_of_every_size_on_eight_devices(split):
    dp = pyparallel.DataParallel(Flagged(), virtual_devices(8), split=split, dispatch="sequential")
    for rows in range(1, 128):
        x = torch.arange(float(rows)).view(rows, 1)
        assert torch.equal(dp(x, flag=True, scale=2), 2 * x)


@pytest.mark.report("pytorch#18563", "dlib#2152")
def test_balanced_chunks_leave_no_single_row_to_batch_norm():
    """50 rows on 8 devices are 7 times 7 and 1, or 6 and 7."""
    x = torch.randn(50, 3)
    net = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        pyparallel.DataParallel(net, virtual_devices(8))(x)
    balanced = pyparallel.DataParallel(net, virtual_devices(8), split="balanced")
    assert balanced(x).shape == x.shape


class Captions(pyparallel.DataParallel):
    """Splits lists of strings as long as the batch, as the images are split."""

    def scatter(self, inputs, kwargs, device_ids):
        images, captions = inputs
        parts, _ = super().scatter((images,), None, device_ids)
        rows = iter(captions)
        return [(part, [next(rows) for _ in part]) for (part,) in parts], [{}] * len(parts)


@pytest.mark.report(
    "pytorch#75442",
    "pytorch#52597",
    "pytorch#34516",
    "lightning#1508",
    "lightning#1206",
    "mmcv#792",
    "mmcv#2524",
    "mmengine#1501",
)
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_a_subclass_splits_lists_in_its_own_way(rows):
    class Count(nn.Module):
        def forward(self, images, captions):
            assert len(images) == len(captions)
            lengths = [len(caption) for caption in captions]
            return images + torch.tensor(lengths).view(-1, 1)

    images, captions = torch.zeros(rows, 1), ["x" * i for i in range(rows)]
    out = Captions(Count(), virtual_devices(4))(images, captions)
    assert out.flatten().tolist() == list(range(rows))


class Weighted(pyparallel.DataParallel):
    """The first device, say an older one, gets half as many rows as the others."""

    def scatter(self, inputs, kwargs, device_ids):
        weights = torch.tensor([1.0] + [2.0] * (len(device_ids) - 1))
        (x,) = inputs
        ends = (len(x) * weights.cumsum(0) / weights.sum()).round().long().tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        places = [x[:0].device] * len(sizes) if x.is_cpu else device_ids
        parts = [part.to(place) for part, place in zip(x.split(sizes), places, strict=True)]
        return [(part,) for part in parts], [{}] * len(parts)


@pytest.mark.report(
    "pytorch#46381", "pytorch#31553", "CornerNet#108", "CenterNet#779", "pytorch#34516"
)
def test_a_subclass_gives_devices_unequal_shares():
    seen = []

    class Look(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    net = Look(2, 2)
    x = torch.randn(10, 2)
    out = Weighted(net, virtual_devices(3), dispatch="sequential")(x)
    assert seen == [2, 4, 4]
    torch.testing.assert_close(out, nn.functional.linear(x, net.weight, net.bias))
    out.sum().backward()
    torch.testing.assert_close(net.weight.grad, x.sum(0).expand(2, 2))


@pytest.mark.report("pytorch#116400")
@pytest.mark.parametrize("how", ["batch dimension", "buffer"])
def test_a_mask_without_a_batch_dimension(how):
    """It is a tensor like others, so it is cut; with a first dimension of one row it is not."""

    class Attention(nn.TransformerEncoderLayer):
        def forward(self, x, mask=None):
            mask = self.mask if mask is None else mask.squeeze(0)
            assert mask.shape == (6, 6)
            return super().forward(x, src_mask=mask)

    net = Attention(4, 2, dim_feedforward=4, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    net.register_buffer("mask", mask)
    x = torch.randn(5, 6, 4)
    dp = pyparallel.DataParallel(net, virtual_devices(4))
    out = dp(x, mask.unsqueeze(0)) if how == "batch dimension" else dp(x)
    torch.testing.assert_close(out, net(x))


@pytest.mark.report("pytorch#31422")
def test_sequences_are_packed_inside_forward():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(2, 3, batch_first=True)

        def forward(self, padded, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                padded, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            return self.gru(packed)[1][0]

    net, padded, lengths = Reader(), torch.randn(5, 4, 2), torch.tensor([4, 1, 3, 2, 4])
    dp = pyparallel.DataParallel(net, virtual_devices(3))
    torch.testing.assert_close(dp(padded, lengths), net(padded, lengths))


@pytest.mark.report("pytorch#32444", "pytorch#39437", "pytorch#22670")
def test_sparse_parameters_are_copied_and_trained():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.weight, x.t()).t()

    net, x = Mixing(), torch.arange(8.0).view(4, 2)
    out = pyparallel.DataParallel(net, virtual_devices(2))(x)
    assert torch.equal(out, x @ net.weight.detach().to_dense().t())
    out.sum().backward()
    assert net.weight.grad.to_dense().tolist() == [[0.0, 16.0], [12.0, 0.0]]
