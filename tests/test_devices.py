"""What users write for devices, and what it means with and without virtual devices and GPUs."""

import pytest
import torch

from pyparallel.devices import Device, check_exists, parse_device, resolve_devices, virtual_devices


def cpu(*indices):
    return [Device("cpu", i) for i in indices]


def cuda(*indices):
    return [Device("cuda", i) for i in indices]


@pytest.fixture
def gpus(monkeypatch):
    """A machine with four GPUs, as far as counting them goes; the current one is 2."""
    from pyparallel import devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    devices._resolve.cache_clear()
    yield
    devices._resolve.cache_clear()


@pytest.fixture
def no_gpus(monkeypatch):
    from pyparallel import devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    devices._resolve.cache_clear()
    yield
    devices._resolve.cache_clear()


def test_virtual_devices():
    assert virtual_devices(3) == ["cpu:0", "cpu:1", "cpu:2"]
    assert virtual_devices(0) == []
    assert len(virtual_devices(16)) == 16
    with pytest.raises(ValueError, match="-1"):
        virtual_devices(-1)
    with pytest.raises(TypeError, match="expects a number of devices, but got '4'"):
        virtual_devices("4")
    with pytest.raises(ValueError, match="at most 16 ranks, but got 17 devices"):
        virtual_devices(17)


def test_device_is_where_tensors_are():
    assert Device("cpu", 3).torch_device == torch.device("cpu")
    assert Device("cpu", 3).torch_device == torch.empty(0).device
    assert Device("cuda", 3).torch_device == torch.device("cuda", 3)
    assert [str(d) for d in (*cpu(3), *cuda(0))] == ["cpu:3", "cuda:0"]


@pytest.mark.parametrize(
    "named, indices",
    [
        (["cpu:0", "cpu:1"], [0, 1]),
        (["cpu:5", "cpu:2"], [5, 2]),
        ((torch.device("cpu:1"), "cpu:1"), [1, 1]),
        (["cpu"] * 3, [0, 1, 2]),
        ([torch.device("cpu")] * 2, [0, 1]),
        ({"cpu:1": 0}, [1]),
        (cpu(1, 0), [1, 0]),
        ([], []),
    ],
)
@pytest.mark.parametrize("variable", [None, "2"])
def test_named_virtual_devices(monkeypatch, variable, named, indices):
    if variable:
        monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", variable)
    assert resolve_devices(iter(named)) == cpu(*indices)


def test_the_variable_gives_none_and_ints_their_meaning(monkeypatch, gpus):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "3")
    assert resolve_devices(None) == cpu(0, 1, 2)
    assert resolve_devices([2, 0]) == cpu(2, 0)
    assert resolve_devices(["cuda:1"]) == cuda(1)
    with pytest.raises(ValueError, match="cpu:3 is not there: there are 3 virtual devices"):
        resolve_devices([0, 3])


def test_gpus_without_the_variable(gpus):
    assert resolve_devices(None) == cuda(0, 1, 2, 3)
    assert resolve_devices([1, "cuda:0", torch.device("cuda:3")]) == cuda(1, 0, 3)
    assert resolve_devices([0, 0, 0]) == cuda(0, 0, 0)
    with pytest.raises(ValueError, match="cuda:4 is not there: this machine has 4 GPUs"):
        resolve_devices([4])


def test_current_gpu_is_asked_at_every_call(monkeypatch, gpus):
    assert resolve_devices(["cuda", torch.device("cuda"), 0]) == cuda(2, 2, 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_devices(["cuda"]) == cuda(1)
    for name in ("cuda", torch.device("cuda")):
        with pytest.raises(
            ValueError,
            match="Expected a torch.device with a specified index or an integer, but got:cuda",
        ):
            resolve_devices([name], need_index=True)


def test_machine_without_gpus(no_gpus):
    assert resolve_devices(None) == []
    for named in ([0], ["cuda:0"]):
        with pytest.raises(ValueError, match="this machine has 0 GPUs.*VIRTUAL_DEVICES is not set"):
            resolve_devices(named)


@pytest.mark.parametrize(
    "named, error, text",
    [
        ([-1], RuntimeError, "Expected non-negative device index, but got -1"),
        ([1.5], ValueError, "specified index or an integer, but got:1.5"),
        ([None], ValueError, "specified index or an integer, but got:None"),
        ([0.0], ValueError, "specified index or an integer, but got:0.0"),
        (["cpu:0", [0]], ValueError, r"specified index or an integer, but got:\[0\]"),
        (["cpu:128"], ValueError, "cpu:128 is no device: indices go from 0 to 127"),
        (["cpu:256"], ValueError, "cpu:256 is no device"),
        (["cuda:300"], ValueError, "cuda:300 is no device"),
        (["cpu:-1"], RuntimeError, "cpu:-1"),
        ([torch.device("cpu:128")], RuntimeError, "non-negative device index, but got -128"),
        ([Device("cpu", -2)], RuntimeError, "non-negative device index, but got -2"),
        (["cpu"] * 17, ValueError, "at most 16 ranks, but got 17 devices"),
        ([0] * 17, ValueError, "at most 16 ranks, but got 17 devices"),
        ("cpu:0", TypeError, r"list of devices, but got 'cpu:0'; write \['cpu:0'\]"),
        (0, TypeError, r"list of devices, but got 0; write \[0\]"),
        (torch.device("cpu"), TypeError, "list of devices, but got device"),
        (["gpu:0"], RuntimeError, "gpu"),
        (["meta"], ValueError, "Expected a GPU or a virtual device, but got: meta"),
        (["cpu", "cpu:1"], ValueError, "specified index or an integer, but got:cpu"),
        (["cpu:0", "cuda:0"], ValueError, "either GPUs or virtual devices"),
    ],
)
def test_bad_devices(gpus, named, error, text):
    for _ in range(2):  # errors are not cached as something else
        with pytest.raises(error, match=text):
            resolve_devices(named)


def test_the_largest_numbers(gpus):
    assert resolve_devices(["cpu:127"] * 16) == cpu(*[127] * 16)


def test_more_gpus_than_ranks(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 17)
    with pytest.raises(ValueError, match="at most 16 ranks, but got 17 devices"):
        resolve_devices(None)
    assert resolve_devices([16]) == cuda(16)


def test_results_are_not_shared():
    first = resolve_devices(["cpu:0"])
    first.append(Device("cpu", 9))
    assert resolve_devices(["cpu:0"]) == cpu(0)


def test_parse_device_ints_are_of_the_kind_asked_for():
    assert parse_device(1, "cpu") == ("cpu", 1)
    assert parse_device(1, "cuda") == ("cuda", 1)
    assert parse_device("cuda", "cpu") == ("cuda", None)


def test_check_exists_without_a_count():
    check_exists(Device("cpu", 100), None)
    with pytest.raises(ValueError, match="cpu:2 is not there"):
        check_exists(Device("cpu", 2), 2)
