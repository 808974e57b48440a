"""Many small tensors against one flat tensor of as many bytes, broadcast to virtual devices."""

import functools
from array import array

import torch
from bars import Line, Sample, in_turns, median_ms, quartiles, ratios, sample
from ranks import Buffer, Ranks

import pyparallel
from pyparallel import comm
from pyparallel.flat import FlatLayout

NRANKS = 4
NUMEL = 3500  # of each tensor


def coalesced_lines(ntensors: int, rounds: int) -> list[Line]:
    tensors = list(torch.rand(ntensors, NUMEL).unbind())
    return [_fresh(tensors, rounds), _persistent(tensors, rounds)]


def _line(name: str, bar: float, wrong: int, samples: dict[str, list[Sample]]) -> Line:
    return Line(
        name=name,
        unit="x",
        quartiles=quartiles(ratios(samples["many"], samples["flat"])),
        bar=bar,
        higher_is_better=False,
        wrong=wrong,
        note=f"flat {median_ms(samples['flat']):.2f} ms, ours {median_ms(samples['many']):.2f} ms",
    )


def _fresh(tensors: list[torch.Tensor], rounds: int) -> Line:
    """The public functions, which allocate their results."""
    devices = pyparallel.virtual_devices(NRANKS)
    flat = torch.cat(tensors)
    rows = comm.broadcast_coalesced(tensors, devices)
    wrong = sum(int((a != b).sum()) for row in rows for a, b in zip(row, tensors, strict=True))
    del rows
    samples = in_turns(
        {
            "many": functools.partial(sample, lambda: comm.broadcast_coalesced(tensors, devices)),
            "flat": functools.partial(sample, lambda: comm.broadcast(flat, devices)),
        },
        rounds,
    )
    return _line("coalesced / flat broadcast, fresh outputs", 1.3, wrong, samples)


def _persistent(tensors: list[torch.Tensor], rounds: int) -> Line:
    """The core with a table of segments, into memory that is there."""
    ranks = Ranks("cpu", NRANKS, timeout_s=60)
    layout = FlatLayout(tensors)
    count = (layout.offsets[-1] + layout.nbytes[-1]) // tensors[0].element_size()
    outputs = [Buffer(device, count, torch.float32, 0) for device in ranks.devices[1:]]
    destinations = [0, *(output.pointer for output in outputs)]
    sources = array("Q", [t.data_ptr() for t in tensors])

    def many() -> None:
        ranks.core.broadcast(
            0,
            sources,
            layout.moved_offsets,
            layout.moved_nbytes,
            destinations,
            ranks.streams,
            "auto",
        )

    expected = torch.full((count,), -1.0)  # between the tensors nothing is written
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        start = offset // tensor.element_size()
        expected[start : start + NUMEL] = tensor
    many()
    wrong = sum(output.wrong(expected) for output in outputs)
    flat, nbytes = torch.cat(tensors), sum(layout.nbytes)

    def one() -> None:
        ranks.core.broadcast(
            0, [flat.data_ptr()], [0], [nbytes], destinations, ranks.streams, "auto"
        )

    runs = {"many": functools.partial(sample, many), "flat": functools.partial(sample, one)}
    samples = in_turns(runs, rounds)
    return _line("segments / flat broadcast, persistent outputs", 1.1, wrong, samples)
