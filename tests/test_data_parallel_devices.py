"""Devices that the wrapper refuses, before it does anything, and those that it takes."""

import pytest
import torch
from torch import nn

from pyparallel.data_parallel import DataParallel
from pyparallel.one_forward import data_parallel

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are devices there")


@pytest.fixture
def four_virtual_devices(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "4")


@no_gpu
@pytest.mark.parametrize("variable", [None, "4"])
@pytest.mark.parametrize(
    "device_ids, error, text",
    [
        ("cpu:0", TypeError, "list of devices, but got 'cpu:0'"),
        ([0.0], ValueError, "specified index or an integer, but got:0.0"),
        ([None], ValueError, "specified index or an integer, but got:None"),
        ([[0]], ValueError, r"specified index or an integer, but got:\[0\]"),
        (["cpu:128"], ValueError, "cpu:128 is no device"),
        ([-1], RuntimeError, "non-negative device index, but got -1"),
        (["cpu"] * 17, ValueError, "at most 16 ranks, but got 17 devices"),
    ],
)
def test_what_is_no_list_of_devices_is_refused(monkeypatch, variable, device_ids, error, text):
    if variable:
        monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", variable)
    with pytest.raises(error, match=text):
        DataParallel(nn.Linear(3, 2), device_ids)


@no_gpu
@pytest.mark.parametrize(
    "output_device, error, text",
    [
        (5, ValueError, "cpu:5 is not there: there are 4 virtual devices"),
        ("cpu:5", ValueError, "cpu:5 is not there: there are 4 virtual devices"),
        (torch.device("cpu:4"), ValueError, "cpu:4 is not there"),
        ("cpu:128", ValueError, "cpu:128 is no device"),
        (-2, RuntimeError, "non-negative device index, but got -2"),
        ("cuda:0", ValueError, "cuda:0 is not there"),
        (0.5, ValueError, "specified index or an integer, but got:0.5"),
    ],
)
def test_bad_output_devices_are_refused(four_virtual_devices, output_device, error, text):
    with pytest.raises(error, match=text):
        DataParallel(nn.Linear(3, 2), output_device=output_device)
    with pytest.raises(error, match=text):
        data_parallel(nn.Linear(3, 2), torch.ones(4, 3), output_device=output_device)


def test_an_output_device_may_be_any_virtual_device_that_is_there(monkeypatch):
    assert (
        DataParallel(nn.Linear(3, 2), ["cpu:5", "cpu:2"], output_device="cpu:2").output_device == 2
    )
    with pytest.raises(ValueError, match="cpu:6 is not there: there are 6 virtual devices"):
        DataParallel(nn.Linear(3, 2), ["cpu:5", "cpu:2"], output_device="cpu:6")
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "7")
    model = DataParallel(nn.Linear(3, 2), ["cpu:5", "cpu:2"], output_device="cpu:6")
    assert model(torch.ones(4, 3)).shape == (4, 2)


def test_an_output_device_is_of_the_kind_of_the_ranks(monkeypatch, four_virtual_devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="either GPUs or virtual devices.*cpu:0, cuda:1"):
        DataParallel(nn.Linear(3, 2), output_device="cuda:1")
