"""The functions of ``torch.nn.parallel``."""

import inspect
import os
import threading

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import parallel
from pyparallel.devices import virtual_devices


@pytest.mark.behaviour(42, 56, 107, 142)
@pytest.mark.parametrize("name", ["replicate", "scatter", "gather", "parallel_apply"])
def test_signatures_are_torchs(name):
    ours = inspect.signature(getattr(parallel, name)).parameters.values()
    theirs = inspect.signature(getattr(nn.parallel, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


@pytest.mark.behaviour(142)
def test_names():
    assert {"replicate", "scatter", "gather", "parallel_apply"} < set(parallel.__all__)
    assert parallel.DataParallel is pyparallel.DataParallel
    assert parallel.data_parallel is pyparallel.data_parallel


@pytest.mark.behaviour(142)
def test_together_they_are_a_forward(make_devices, put):
    devices = make_devices(3)
    net = nn.Linear(3, 2).to(put(torch.empty(0), devices[0]).device)
    x = put(torch.randn(5, 3), devices[0])
    inputs, kwargs = parallel.scatter_kwargs((x,), {}, devices)
    replicas = parallel.replicate(net, devices[: len(inputs)])
    outputs = parallel.parallel_apply(replicas, inputs, kwargs, devices[: len(inputs)])
    out = parallel.gather(outputs, devices[0])
    torch.testing.assert_close(out, net(x))
    out.sum().backward()
    torch.testing.assert_close(net.weight.grad, x.sum(0).expand(2, 3))


@pytest.mark.behaviour(42)
def test_a_tensor_is_split_into_a_tuple_and_others_into_a_list():
    x = torch.arange(5.0)
    devices = virtual_devices(4)
    parts = parallel.scatter(x, devices)
    assert type(parts) is tuple and [part.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    parts = parallel.scatter([x, "s"], devices)
    assert type(parts) is list and parts[2][0].tolist() == [4] and parts[2][1] == "s"
    assert parallel.scatter(3, devices) == [3] * 4
    columns = parallel.scatter(x.expand(2, 5), devices, dim=1)
    assert [part.shape for part in columns] == [(2, 2), (2, 2), (2, 1)]


@pytest.mark.behaviour(131)
@pytest.mark.parametrize("target", ["cpu", torch.device("cpu"), None, -1, "cpu:1", 1, 0])
def test_targets(monkeypatch, target):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "2")
    outputs = [{"a": torch.tensor([rank])} for rank in range(2)]
    if target == -1:
        with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
            out = parallel.gather(outputs, target)
    else:
        out = parallel.gather(outputs, target)
    assert out["a"].tolist() == [0, 1]


@pytest.mark.cuda
@pytest.mark.behaviour(9, 130, 131, 135, 138)
def test_targets_of_gpus(make_devices):
    devices = make_devices(2)
    gpu = torch.device(devices[0])
    outputs = [torch.full((2,), float(rank), device=d) for rank, d in enumerate(devices)]
    for target, place in [
        (0, torch.device("cuda", 0)),
        (devices[1], torch.device(devices[1])),
        (None, torch.device("cuda", torch.cuda.current_device())),
        ("cpu", torch.device("cpu")),
        (torch.device("cpu"), torch.device("cpu")),
    ]:
        out = parallel.gather(outputs, target)
        assert out.device == place and out.tolist() == [0, 0, 1, 1]
    with pytest.warns(FutureWarning, match="Using -1"):
        assert parallel.gather(outputs, -1).device.type == "cpu"
    out = parallel.gather([outputs[0], outputs[1].cpu()], devices[0])
    assert out.device == gpu and out.tolist() == [0, 0, 1, 1]
    assert parallel.gather([torch.ones(1), torch.ones(1)], devices[0]).device == gpu
    one = parallel.gather(outputs[:1], devices[0])
    assert one.data_ptr() != outputs[0].data_ptr()


class Place(nn.Module):
    def forward(self, *args):
        current = torch.cuda.current_device() if torch.cuda.is_available() else None
        return current, threading.get_ident(), args


@pytest.mark.behaviour(109, 118)
def test_devices_are_found_where_they_were_not_named():
    """On virtual devices any will do; torch takes the current GPU for all modules."""
    modules = [nn.Linear(2, 2) for _ in range(3)]
    inputs = [torch.ones(1, 2)] * 3
    outputs = parallel.parallel_apply(modules, inputs)
    for module, output in zip(modules, outputs, strict=True):
        torch.testing.assert_close(output, module(torch.ones(1, 2)))
    assert [out[2] for out in parallel.parallel_apply([Place()] * 2, [1, ()])] == [(1,), ()]
    assert len(parallel.parallel_apply([Place(), modules[0]], [1, *inputs[:1]])) == 2
    assert parallel.parallel_apply([], []) == []


@pytest.mark.cuda
@pytest.mark.behaviour(109, 111)
def test_devices_of_gpus_are_found_where_they_were_not_named(make_devices):
    devices = [torch.device(d) for d in make_devices(2)]
    placed = [Place() for _ in devices]
    for module, device in zip(placed, devices, strict=True):
        module.register_buffer("here", torch.empty(0, device=device))
    current = [device.index for device in devices]
    assert [out[0] for out in parallel.parallel_apply(placed, [(), ()])] == current
    inputs = [{"x": torch.empty(0, device=device)} for device in devices]
    assert [out[0] for out in parallel.parallel_apply([Place()] * 2, inputs)] == current


@pytest.mark.behaviour(107)
@pytest.mark.parametrize("what", ["inputs", "kwargs_tup", "devices"])
def test_lengths_are_checked_in_torchs_words(what):
    arguments = {"inputs": [1, 1], "kwargs_tup": [{}, {}], "devices": virtual_devices(2)}
    arguments[what] = arguments[what][:1]
    texts = []
    for module in (parallel, nn.parallel):
        with pytest.raises(AssertionError) as caught:
            module.parallel_apply([nn.ReLU()] * 2, **arguments)
        texts.append(str(caught.value))
    assert texts[0] == f"The number of modules 2 is not equal to the number of {what} 1"
    assert texts[1] in (texts[0], "")  # older torch, as 2.6, has words only for inputs
    for inputs in ([], [1], [1, 1, 1]):
        with pytest.raises(AssertionError, match=f"number of modules 2 .* inputs {len(inputs)}"):
            parallel.parallel_apply([nn.ReLU()] * 2, inputs)


@pytest.mark.behaviour(108)
def test_a_list_or_tuple_is_all_arguments_and_anything_else_the_only_one():
    x = torch.ones(2)
    inputs = [x, (x, 1), [x, 1], {"x": 1}, (), None, "text"]
    outputs = [out[2] for out in parallel.parallel_apply([Place()] * len(inputs), inputs)]
    assert outputs[0][0] is x and len(outputs[0]) == 1
    assert outputs[1:3] == [(x, 1), (x, 1)]
    assert outputs[3:] == [({"x": 1},), (), (None,), ("text",)]


@pytest.mark.behaviour(56)
def test_replicate_takes_any_collection_of_devices():
    net = nn.Linear(2, 2)
    for devices in ({"cpu:0": 0}, ("cpu:0", "cpu:1"), iter(["cpu:0"]), []):
        count = 1 if not isinstance(devices, (tuple, list)) else len(devices)
        replicas = parallel.replicate(net, devices)
        assert len(replicas) == count and net not in replicas
    attached, detached = (parallel.replicate(net, ["cpu:0"], d)[0] for d in (False, True))
    assert attached.weight.grad_fn is not None and detached.weight is net.weight


@pytest.mark.behaviour(142)
def test_ints_are_virtual_devices_if_the_environment_says_so(monkeypatch):
    monkeypatch.setitem(os.environ, "PYPARALLEL_VIRTUAL_DEVICES", "2")
    x = torch.ones(4, 2)
    inputs = parallel.scatter(x, [0, 1])
    outputs = parallel.parallel_apply(parallel.replicate(nn.ReLU(), [0, 1]), inputs, devices=[0, 1])
    assert torch.equal(parallel.gather(outputs, 0), x)
