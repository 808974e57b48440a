"""The order of streams around a bucket's sum, on streams that only note who waits for whom.

This shows what is asked of CUDA, and in which order. It shows nothing about a real GPU.
"""

import contextlib

import pytest
import torch

from pyparallel import _C, core, side_streams
from pyparallel.accumulation import Accumulation
from pyparallel.bucket_functions import BucketNodes
from pyparallel.communicator import Communicator
from pyparallel.devices import Device, resolve_devices
from pyparallel.gradient_bucket import GradientBucket
from pyparallel.side_streams import SideStreams


class Stream:
    def __init__(self, log, name, index):
        self.log, self.name, self.index = log, name, index
        self.cuda_stream = {"compute": 10, "side": 20}[name] + index

    def wait_stream(self, other):
        self.log.append((f"{self.name}:{self.index} waits for", f"{other.name}:{other.index}"))


class Layer:
    """Stands in for torch.cuda: what was done, and the current stream of each of three GPUs."""

    def __init__(self):
        self.log = []
        self.current = [Stream(self.log, "compute", i) for i in range(3)]

    def make(self, device, priority):
        assert priority < 0
        return Stream(self.log, "side", device)

    @contextlib.contextmanager
    def on(self, stream):
        before = self.current[stream.index]
        self.current[stream.index] = stream
        self.log.append(("enters", f"{stream.name}:{stream.index}"))
        yield
        self.current[stream.index] = before

    def record(self, tensor, streams):
        assert all(stream.name == "side" for stream in streams.values())
        self.log.append(("records", tensor.data_ptr()))


@pytest.fixture
def layer(monkeypatch):
    layer = Layer()
    monkeypatch.setattr(torch.cuda, "Stream", layer.make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: layer.current[index])
    monkeypatch.setattr(torch.cuda, "stream", layer.on)
    monkeypatch.setattr(side_streams, "_record", layer.record)
    monkeypatch.setattr(Device, "torch_device", torch.device("cpu"))
    monkeypatch.setattr(core, "_open", lambda devices: _C.Communicator("host", [0] * len(devices)))
    side_streams._side_stream.cache_clear()
    yield layer
    side_streams._side_stream.cache_clear()


class LoggedCore:
    def __init__(self, real, log):
        self._real, self._log = real, log

    def reduce_add(self, *args, **kwargs):
        self._log.append(("sum on", args[6]))
        return self._real.reduce_add(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._real, name)


class Ranks(Communicator):
    def __init__(self, log):
        super().__init__([Device("cuda", 0), Device("cuda", 2), Device("cuda", 0)])
        self.log = log

    @property
    def core(self):
        return LoggedCore(super().core, self.log)


def bucket_of(layer, parameters):
    communicator = Ranks(layer.log)
    return GradientBucket(communicator, parameters, Accumulation(communicator))


def compute_waits(log):
    return [entry for entry in log if entry[0].startswith("compute")]


def test_virtual_devices_have_no_side_streams(make_devices):
    side = SideStreams(resolve_devices(make_devices(3)))
    if not torch.cuda.is_available():
        assert side.follow([torch.ones(1)]) == [0, 0, 0]
        with side.on_root():
            pass


def test_a_sum_runs_beside_the_compute_streams(layer):
    bucket = bucket_of(layer, [torch.zeros(3), torch.zeros(2)])
    grads = [torch.full((n,), float(rank)) for rank in range(3) for n in (3, 2)]
    sums = bucket.launch(grads)
    bucket.wait()
    assert [total.tolist() for total in sums] == [[3.0] * 3, [3.0] * 2]
    waits = [("side:0 waits for", "compute:0"), ("side:2 waits for", "compute:2")]
    assert layer.log[:2] == waits
    assert layer.log[-1] == ("sum on", [20, 22, 20])  # all that it reads is ordered before it
    assert compute_waits(layer.log) == []
    # Freed memory is kept for the sum: that of the gradients, and that of the flat buffer.
    recorded = {address for what, address in layer.log if what == "records"}
    assert recorded == {t.data_ptr() for t in [*grads, sums[0]]}


def test_temporary_copies_are_made_before_the_streams_wait(layer, monkeypatch):
    import pyparallel.gradient_bucket as module

    copies = []
    original = module.with_strides

    def noted(tensor, stride):
        copies.append(original(tensor, stride))
        layer.log.append(("copies", tensor.data_ptr()))
        return copies[-1]

    monkeypatch.setattr(module, "with_strides", noted)
    bucket = bucket_of(layer, [torch.zeros(2, 3)])
    (total,) = bucket.launch([torch.ones(3, 2).t() for _ in range(3)])
    bucket.wait()
    assert total.tolist() == [[3.0] * 3] * 2
    kinds = [entry[0] for entry in layer.log]
    assert kinds.index("side:0 waits for") > max(i for i, k in enumerate(kinds) if k == "copies")
    recorded = {address for what, address in layer.log if what == "records"}
    assert {t.data_ptr() for t in copies} <= recorded


@pytest.mark.parametrize(
    "grad",
    [torch.ones(4), torch.eye(4).to_sparse()[0], torch.ones(4, dtype=torch.int8)],
    ids=["strided", "sparse", "added by torch"],
)
def test_results_of_every_path_are_handed_to_the_side_stream(grad, layer):
    bucket = bucket_of(layer, [torch.zeros(4, dtype=grad.dtype)])
    (total,) = bucket.launch([grad, grad, grad])
    bucket.wait()
    parts = side_streams._parts(total)
    assert ("side:0 waits for", "compute:0") in layer.log
    assert all(("records", part.data_ptr()) in layer.log for part in parts)
    assert compute_waits(layer.log) == []


def test_layouts_and_their_parts():
    dense = torch.eye(4)
    for sparse, count in [
        (dense, 1),
        (dense.to_sparse(), 2),
        (dense.to_sparse_csr(), 3),
        (dense.to_sparse_csc(), 3),
        (dense.to_sparse_bsr((2, 2)), 3),
        (dense.to_sparse_bsc((2, 2)), 3),
    ]:
        parts = side_streams._parts(sparse)
        assert len(parts) == count and all(part.layout is torch.strided for part in parts)


@pytest.mark.parametrize("mode", ["once", "twice", "no_sync"])
def test_nodes_belong_to_the_side_stream_of_the_root(mode, layer):
    weights = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    bucket = bucket_of(layer, weights)
    layer.log.clear()
    nodes = BucketNodes(bucket, weights, [[torch.ones(3), torch.ones(2)] for _ in range(2)])
    # Both were applied there, and what the caller had is current again.
    assert layer.log == [("enters", "side:0")]
    assert [stream.name for stream in layer.current] == ["compute"] * 3
    nodes.prepare(1, layer.current)
    layer.log.clear()
    loss = sum((tensor * tensor).sum() for row in nodes.rows for tensor in row)
    if mode == "twice":
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        assert [g.tolist() for g in grads] == [[6.0] * 3, [6.0] * 2]
    elif mode == "no_sync":
        with bucket.accumulation.on():
            loss.backward()
        assert weights[0].grad.tolist() == [2.0] * 3  # rank 0's part
    else:
        loss.backward()
        assert [w.grad.tolist() for w in weights] == [[6.0] * 3, [6.0] * 2]
    assert ("side:0 waits for", "compute:0") in layer.log
    assert compute_waits(layer.log) == []
