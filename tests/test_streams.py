"""Stream handles: none for virtual devices, the current ones for GPUs."""

import pytest
import torch

from pyparallel.devices import Device, resolve_devices
from pyparallel.streams import current_streams


def test_virtual_devices_have_no_streams(ranks):
    assert current_streams([Device("cpu", i) for i in range(ranks)]) == [0] * ranks


def test_handles_of_gpus_are_the_current_streams(monkeypatch):
    class Stream:
        def __init__(self, index):
            self.cuda_stream = 100 + index

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    assert current_streams([Device("cuda", i) for i in (1, 0, 1)]) == [101, 100, 101]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_context_counts():
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        assert current_streams(resolve_devices(["cuda:0"])) == [stream.cuda_stream]
    assert current_streams(resolve_devices(["cuda:0"])) != [stream.cuda_stream]
