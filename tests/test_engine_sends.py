"""The step engine: what is sent to the ranks, and what is not."""

import pytest
import torch
import torch.nn.functional as F
from engine_nets import N, Net, nbytes
from torch import nn


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.behaviour(179)
@pytest.mark.report("pytorch#3930", "pytorch#28275")
def test_only_what_changed_is_sent(wrap):
    net = Net().eval()
    net.second.requires_grad_(False)
    model = wrap(net)
    x = torch.randn(6, 4)
    total = nbytes([*net.parameters(), *net.buffers()]) * (N - 1)
    assert model.transfer_stats() == {"bytes_sent": 0, "bytes_skipped": 0}
    model(x)
    stats = model.transfer_stats(reset=True)
    assert stats["bytes_sent"] + stats["bytes_skipped"] == total
    assert stats["bytes_sent"] > total / 2  # new memory may hold zeros by chance
    for _ in range(2):
        model(x)
        with torch.no_grad():
            model(x)
    assert model.transfer_stats(reset=True) == {"bytes_sent": 0, "bytes_skipped": 4 * total}
    with torch.no_grad():
        net.second.bias.mul_(1.5)
    model(x)
    sent = net.second.bias.nbytes * (N - 1)
    assert model.transfer_stats() == {"bytes_sent": sent, "bytes_skipped": total - sent}


def test_a_small_change_is_sent_exactly(wrap):
    net = nn.Linear(1000, 1000)
    model = wrap(net)
    with torch.no_grad():
        model(torch.randn(3, 1000))
        for index, change in [(17, -1.0), (999_999, 1 + 2**-23), (3, 0.0)]:
            net.weight.view(-1)[index] *= change
            model.transfer_stats(reset=True)
            x = torch.eye(1000)
            torch.testing.assert_close(model(x), F.linear(x, net.weight, net.bias))
            assert model.transfer_stats()["bytes_sent"] <= 2**15 * (N - 1)


def test_a_rank_that_changed_its_copy_gets_it_afresh(wrap):
    class Spoils(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if x[0, 0] > 0:
                with torch.no_grad():
                    self.weight.zero_()
            return out

    net = Spoils(3, 3)
    model = wrap(net)
    x = torch.randn(6, 3)
    x[:, 0] = torch.tensor([-1.0, -1, -1, -1, 1, 1])  # on the last rank
    expected = F.linear(x, net.weight, net.bias)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)


def test_resend_always(wrap):
    net = Net()
    model = wrap(net, resend="always")
    for _ in range(2):
        model(torch.randn(6, 4))
    total = nbytes([*net.parameters(), *net.buffers()]) * (N - 1)
    assert model.transfer_stats() == {"bytes_sent": 2 * total, "bytes_skipped": 0}


def test_one_percent_trainable(wrap):
    net = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
    net[0].requires_grad_(False)
    model = wrap(net)
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 300)).sum().backward()
        optimizer.step()
        stats = model.transfer_stats(reset=True)
        if step:
            assert stats["bytes_sent"] <= 0.015 * nbytes(net.parameters()) * (N - 1)


def test_bad_options_are_refused(wrap):
    for cap in (0, "25"):
        with pytest.raises(ValueError, match=f"bucket_cap_mb must be a number .*, but is {cap!r}"):
            wrap(Net(), bucket_cap_mb=cap)
    with pytest.raises(ValueError, match="resend must be 'auto' or 'always', but is 'never'"):
        wrap(Net(), resend="never")


def test_bucket_cap(wrap):
    net = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(6)])
    model = wrap(net, bucket_cap_mb=0.08)  # two layers and a little more
    model(torch.randn(3, 100)).sum().backward()
    assert [len(b.rows[0]) for b in model._engine.content._recorded.buckets] == [3, 3]
