"""Segment tables through the binding: tensors of every kind, counters, errors."""

import gc
import threading

import pytest
import torch
from tensors import COPIED, values

from pyparallel import _C
from pyparallel.communicator import get_communicator
from pyparallel.devices import resolve_devices
from pyparallel.streams import current_streams

CHUNK = 32 << 10
POISON = 0xA5


class Table:
    """A table over tensors, and the flat buffers of the ranks as bytes."""

    def __init__(self, devices, tensors, root=0, align=512):
        self.devices = resolve_devices(devices)
        self.root = root
        self.tensors = tensors
        self.sizes = [t.numel() * t.element_size() for t in tensors]
        self.offsets = []
        end = 0
        for size in self.sizes:
            self.offsets.append(end)
            end += -(-size // align) * align
        self.flats = [
            torch.full((end + 7,), POISON, dtype=torch.uint8, device=d.torch_device)
            for d in self.devices
        ]
        self.core = get_communicator(self.devices).core
        self.table = _C.SegmentTable(
            self.core, root, self.offsets, self.sizes, [f.data_ptr() for f in self.flats]
        )

    def pointers(self):
        return [t.data_ptr() for t in self.tensors]

    def send(self, always=False):
        """Sends, checks every byte, and returns (sent, skipped)."""
        before = self.table.transferred()
        self.table.send(self.pointers(), current_streams(self.devices), always)
        after = self.table.transferred()
        for rank, flat in enumerate(self.flats):
            want = torch.full((len(flat),), POISON, dtype=torch.uint8)
            if rank != self.root:
                for tensor, offset, size in zip(
                    self.tensors, self.offsets, self.sizes, strict=True
                ):
                    if size:
                        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
                        want[offset : offset + size] = raw
            assert torch.equal(flat.cpu(), want), f"rank {rank}"
        return after[0] - before[0], after[1] - before[1]

    def would_change(self):
        return self.table.would_change(self.pointers(), current_streams(self.devices))


@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_any_dtype_and_size(devices, ranks, root, put, dtype):
    shapes = [(), (3,), (0,), (17, 33), (70_001,), (1, 0, 5)]
    tensors = [put(values(dtype, *s, seed=i), devices[root]) for i, s in enumerate(shapes)]
    table = Table(devices, tensors, root)
    whole = sum(table.sizes) * (ranks - 1)
    assert table.would_change() == (ranks > 1)
    assert table.send() == (whole, 0)
    assert not table.would_change()
    assert table.send() == (0, whole)
    assert table.send(always=True) == (whole, 0)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_misaligned_sources_and_copies(devices, put, shift):
    whole = put(values(torch.uint8, 100_003), devices[0])
    tensors = [whole[shift:40_000], whole[40_000 + shift : 99_999]]
    table = Table(devices, tensors, align=shift)
    table.send()
    whole[50_001] ^= 1
    sent, _ = table.send()
    others = len(devices) - 1
    assert min(others, 1) <= sent <= CHUNK * others


@pytest.mark.parametrize("position", [0, 255, 256, 4095, 4096, CHUNK - 1, CHUNK, 2 * CHUNK])
def test_one_changed_byte_sends_one_chunk(make_devices, put, position):
    devices = make_devices(3)
    table = Table(devices, [put(values(torch.uint8, 2 * CHUNK + 1), devices[0])])
    table.send()
    for bit in (1, 0x80):
        table.tensors[0][position] ^= bit
        assert table.would_change()
        assert table.send()[0] == 2 * (1 if position == 2 * CHUNK else CHUNK)
        assert not table.would_change()


def test_signs_zeros_and_nans_are_bytes(make_devices, put):
    devices = make_devices(2)
    table = Table(devices, [put(torch.tensor([0.0, 1.0, 2.0, float("nan")]), devices[0])])
    table.send()
    assert table.send()[0] == 0  # NaN is the same NaN
    table.tensors[0][0] = -0.0
    assert table.send()[0] == 16
    table.tensors[0][1:3] *= -1
    assert table.send()[0] == 16
    table.tensors[0][1], table.tensors[0][2] = -2.0, -1.0
    assert table.send()[0] == 16


def test_tensors_may_move(make_devices, put):
    devices = make_devices(3)
    table = Table(devices, [put(values(torch.float32, 9000, seed=i), devices[0]) for i in range(5)])
    table.send()
    table.tensors = [t.clone() for t in table.tensors]
    assert table.send()[0] == 0
    table.tensors[3] = table.tensors[3] + 1
    assert table.send()[0] == 2 * 36_000


def test_a_changed_copy_gets_its_values_back(make_devices, put):
    devices = make_devices(4)
    table = Table(devices, [put(values(torch.float32, 50_000), devices[0])])
    table.send()
    table.flats[2][77] ^= 1
    table.table.refresh(2)  # on GPUs it has to be told
    assert table.would_change()
    sent, _ = table.send()
    assert sent == (CHUNK if devices[0].startswith("cpu") else 200_000)
    assert table.send()[0] == 0


def test_few_changes_are_few_bytes(make_devices, put):
    """One percent of the parameters: at most 1.5 % of the bytes."""
    devices = make_devices(4)
    tensors = [put(values(torch.float32, 10_000, seed=i), devices[0]) for i in range(100)]
    table = Table(devices, tensors)
    whole = table.send()[0]
    for _ in range(5):
        tensors[42].add_(1)
        sent, skipped = table.send()
        assert sent + skipped == whole
        assert 0 < sent <= 0.015 * whole


def test_several_threads(make_devices):
    """Each its own table: sends do not mix."""

    def work():
        table = Table(make_devices(3), [values(torch.float32, 40_000)])
        for i in range(20):
            table.tensors[0][i * 1000] += 1
            assert table.send()[0] == 2 * (CHUNK if i != 0 else 160_000)

    if not make_devices(1)[0].startswith("cpu"):
        pytest.skip("counts chunks of the host")
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_it_keeps_the_communicator_alive():
    table = _C.SegmentTable(_C.Communicator("host", [0, 0]), 0, [], [], [0, 0])
    gc.collect()
    table.send([], [0, 0])
    assert table.transferred() == (0, 0)


def test_wrong_arguments():
    core = _C.Communicator("host", [0, 0])
    flat = torch.zeros(64, dtype=torch.uint8).data_ptr()
    with pytest.raises(ValueError, match="segment table: got 2 offsets and 1 sizes"):
        _C.SegmentTable(core, 0, [0, 8], [8], [0, flat])
    with pytest.raises(ValueError, match="rank 1 has no flat buffer"):
        _C.SegmentTable(core, 0, [0], [8], [flat, 0])
    with pytest.raises(ValueError, match="root is 5"):
        _C.SegmentTable(core, 5, [0], [8], [flat, flat])
    with pytest.raises(TypeError, match="flats holds None, which is not an int"):
        _C.SegmentTable(core, 0, [0], [8], [None, flat])
    table = _C.SegmentTable(core, 0, [0], [8], [0, flat])
    with pytest.raises(ValueError, match="got 0 sources for 1 segments"):
        table.send([], [0, 0])
    with pytest.raises(ValueError, match="source 0 is null"):
        table.would_change([0], [0, 0])
    with pytest.raises(ValueError, match="rank is 2"):
        table.refresh(2)
    core.close()
    with pytest.raises(RuntimeError, match="the communicator is closed"):
        table.send([flat], [0, 0])
