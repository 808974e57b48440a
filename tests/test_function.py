"""``data_parallel``, the wrapper as a function for one call."""

import inspect

import pytest
import torch
from torch import nn

from pyparallel.devices import virtual_devices
from pyparallel.one_forward import data_parallel


class Returns(nn.Module):
    def forward(self, *args, **kwargs):
        return [self, args, kwargs]


@pytest.mark.behaviour(140)
def test_the_signature_begins_with_torchs():
    ours = list(inspect.signature(data_parallel).parameters.values())
    torchs = list(inspect.signature(nn.parallel.data_parallel).parameters.values())
    for our, their in zip(ours, torchs, strict=False):
        assert (our.name, our.kind, our.default) == (their.name, their.kind, their.default)
    assert all(more.kind is more.KEYWORD_ONLY for more in ours[len(torchs) :])


@pytest.mark.behaviour(141)
@pytest.mark.parametrize("n", [1, 3])
def test_it_is_the_wrapper(n):
    torch.manual_seed(0)
    net, x, devices = nn.Bilinear(3, 3, 2), torch.randn(5, 3), virtual_devices(n)
    expected = net(x, 2 * x)
    for inputs, kwargs in [((x, 2 * x), None), ((x,), {"input2": 2 * x}), (x, {"input2": 2 * x})]:
        out = data_parallel(net, inputs, devices, None, 0, kwargs)
        torch.testing.assert_close(out, expected)
    out.sum().backward()
    grad, net.weight.grad = net.weight.grad, None
    net(x, 2 * x).sum().backward()
    torch.testing.assert_close(grad, net.weight.grad)


@pytest.mark.behaviour(140)
@pytest.mark.parametrize(
    "inputs, arguments",
    [(None, ()), ((), ()), ((1, 2), (1, 2)), ([1, 2], ([1, 2],)), ({"a": 1}, ({"a": 1},))],
)
def test_what_is_no_tuple_is_the_only_argument(inputs, arguments):
    for devices in (virtual_devices(1), []):
        assert data_parallel(Returns(), inputs, devices)[1:] == [arguments, {}]


@pytest.mark.behaviour(141)
def test_one_device_runs_the_module_itself():
    net = Returns()
    assert data_parallel(net, 1, ["cpu:0"])[0] is net
    assert all(replica is not net for replica in data_parallel(net, 1, virtual_devices(2))[0])


@pytest.mark.behaviour(141)
@pytest.mark.parametrize("devices", [1, 3])
def test_without_inputs_it_runs_once(devices):
    calls = []
    net = nn.Module()
    net.forward = lambda: calls.append(None) or torch.ones(2)
    assert data_parallel(net, None, virtual_devices(devices)).tolist() == [1, 1]
    assert len(calls) == 1


@pytest.mark.behaviour(140)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPUs")
def test_without_devices_it_calls_the_module():
    for devices in (None, [], [0, 1]):
        assert data_parallel(nn.ReLU(), torch.tensor([-1.0]), devices).tolist() == [0]
    with pytest.raises(RuntimeError, match="device type could not be determined"):
        nn.parallel.data_parallel(nn.ReLU(), torch.tensor([-1.0]))


@pytest.mark.behaviour(141)
@pytest.mark.parametrize("n", [1, 2])
def test_the_module_is_never_moved(n):
    net = nn.Linear(2, 2, device="meta")
    expected = (
        r"module must have its parameters and buffers on device cpu \(device_ids\[0\]\) "
        "but found one of them on device: meta"
    )
    with pytest.raises(RuntimeError, match=expected):
        data_parallel(net, torch.ones(1, 2), virtual_devices(n))
    assert net.weight.device.type == "meta"
