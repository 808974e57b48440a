"""The examples of torch.nn.DataParallel's documentation, with only the import changed."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pyparallel import DataParallel


@pytest.fixture(autouse=True)
def _four_virtual_devices(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "4")
    torch.manual_seed(0)


def test_repr():
    model = DataParallel(nn.Linear(10, 5), device_ids=[0, 1])
    assert str(model) == (
        "DataParallel(\n  (module): Linear(in_features=10, out_features=5, bias=True)\n)"
    )


def test_forward():
    linear = nn.Linear(10, 5)
    model = DataParallel(linear, device_ids=[0, 1])
    x = torch.randn(8, 10)
    assert model(x).shape == (8, 5)
    torch.testing.assert_close(model(x), linear(x))


def test_default_devices_are_all():
    model = DataParallel(nn.Linear(10, 5))
    assert model.device_ids == [0, 1, 2, 3]
    assert model(torch.randn(8, 10)).shape == (8, 5)


def test_two_inputs():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(10, 5)

        def forward(self, x, y):
            assert len(x) == len(y) == 2
            return self.fc(x) + y

    net = TwoInputs()
    x, y = torch.randn(8, 10), torch.randn(8, 5)
    out = DataParallel(net)(x, y)
    assert out.shape == (8, 5)
    torch.testing.assert_close(out, net.fc(x) + y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 20)
        self.fc2 = nn.Linear(20, 2)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def train(net, wrap):
    """100 epochs; returns every loss."""
    torch.manual_seed(1)
    loader = DataLoader(torch.randn(100, 10), batch_size=10, shuffle=True)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = wrap(net)
    losses = []
    for epoch in range(100):
        for i, data in enumerate(loader):
            optimizer.zero_grad()
            outputs = model(data)
            loss = criterion(outputs, torch.zeros_like(outputs))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if i % 10 == 0:
                print(f"epoch {epoch + 1}, batch {i}: loss {loss.item():.4f}")
    return losses


def test_training_loop(capsys):
    net = Net()
    reference = copy.deepcopy(net)
    losses = train(net, DataParallel)
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    expected = train(reference, lambda net: net)
    assert len(losses) == 1000 and len(printed) == 100
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert sum(printed[-10:]) < sum(printed[:10]) / 10
