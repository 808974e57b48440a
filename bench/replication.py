"""What it costs to bring the replicas up to date: nothing changed, everything, or one percent.

In grad mode. What undoes the writes of a forward, when that has ended, has a row of its own.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from bars import Sample, in_turns, sample
from ranks import Buffer, Ranks
from rows import Row, compared, measured
from torch import nn
from torch_ranks import TorchRanks

import pyparallel
from pyparallel import _C

NRANKS = 8


class TimedTable(_C.SegmentTable):
    """Knows how long all tables compared and sent, and can leave it out."""

    seconds = 0.0
    unchanged = False  # answer without looking

    def would_change(self, *args, **kwargs):
        return False if TimedTable.unchanged else _timed(super().would_change, *args, **kwargs)

    def send(self, *args, **kwargs):
        _timed(super().send, *args, **kwargs)


def _timed(method, *args, **kwargs):
    start = time.perf_counter()
    result = method(*args, **kwargs)
    TimedTable.seconds += time.perf_counter() - start
    return result


def replication_rows(name: str, model: nn.Module, rounds: tuple[int, int, int]) -> list[Row]:
    """Measures unchanged and changed parameters.

    Args:
        name: Of the model.
        model: Its parameters change.
        rounds: How many measurements: of unchanged ones, of torch, and of changed ones.
    """
    devices = pyparallel.virtual_devices(NRANKS)
    wrapper = pyparallel.DataParallel(model, device_ids=devices)

    def replicate() -> tuple[Sample, Sample]:
        """Times it, and what comes after the forward."""
        start = time.perf_counter()
        replicas = wrapper.replicate(model, wrapper.device_ids)
        middle = time.perf_counter()
        wrapper._engine.content.release(replicas)
        return Sample(middle - start, 0), Sample(time.perf_counter() - middle, 0)

    with mock.patch.object(_C, "SegmentTable", TimedTable):
        replicate()
    theirs = TorchRanks(model, NRANKS)
    torch_s = [theirs.replicate_seconds() for _ in range(rounds[1])]
    rows = [
        *_unchanged(name, replicate, rounds[0], torch_s),
        *_unchanged(name, replicate, rounds[0], torch_s, after_pass=True),
        _changed(name, model, replicate, rounds[2]),
    ]
    wrong = _wrong(wrapper)
    return [dataclasses.replace(row, wrong=wrong) for row in rows]


def _unchanged(
    name: str,
    replicate: Callable[[], tuple[Sample, Sample]],
    rounds: int,
    torch_s: list[float],
    after_pass: bool = False,
) -> list[Row]:
    """The time beside the pass that compares, and that of undoing nothing.

    On the host that pass reads all parameters of all ranks with the CPU, and what comes after it
    finds the interpreter's data in no cache. On GPUs the devices do it. So the row with the bar
    leaves the pass out; with ``after_pass`` it is there but not counted.
    """
    ours_s, undo_s, pass_s = [], [], []
    TimedTable.unchanged = not after_pass
    for _ in range(rounds + 2):
        TimedTable.seconds = 0.0
        whole, undo = replicate()
        pass_s.append(TimedTable.seconds)
        ours_s.append(whole.wall - TimedTable.seconds)
        undo_s.append(undo.wall)
    TimedTable.unchanged = False
    pass_ms, torch_ms = (statistics.median(s) * 1e3 for s in (pass_s, torch_s))
    caches = ", caches cold" if after_pass else ""
    note = f"torch {torch_ms:.1f} ms beside its copies"
    if after_pass:
        note = f"after a comparing pass of {pass_ms:.1f} ms, which is not counted"
    rows = []
    for mode, seconds, with_torch in (("replicate", ours_s, True), ("undo", undo_s, False)):
        row = measured(
            name,
            NRANKS,
            f"{mode}, unchanged{caches}",
            "us",
            [s * 1e6 for s in seconds[2:]],
            200,
            0,
            note if with_torch else "",
            ours_ms=statistics.median(seconds) * 1e3,
            torch_ms=torch_ms if with_torch else None,
        )
        rows.append(row if with_torch and not after_pass else dataclasses.replace(row, bar=None))
    return rows


def _changed(
    name: str, model: nn.Module, replicate: Callable[[], tuple[Sample, Sample]], rounds: int
) -> Row:
    """Against one broadcast of a flat buffer of as many bytes into memory that is there."""
    parameters = list(model.parameters())
    ranks = Ranks("cpu", NRANKS, timeout_s=60)
    count = sum(p.numel() for p in parameters)
    flat, *outputs = (Buffer(device, count, torch.float32, 0) for device in ranks.devices)
    flat.fill(torch.cat([p.detach().flatten() for p in parameters]))
    destinations = [0, *(output.pointer for output in outputs)]

    def broadcast() -> None:
        ranks.core.broadcast(
            0, [flat.pointer], [0], [flat.nbytes], destinations, ranks.streams, "auto"
        )

    def change(bodies: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for body in bodies:
                body.neg_()

    def flat_broadcast() -> Sample:
        change([flat.body])
        return sample(broadcast)

    def ours() -> Sample:
        change(parameters)
        return replicate()[0]

    samples = in_turns({"bare": flat_broadcast, "ours": ours}, rounds)
    return compared(name, NRANKS, "replicate, all changed", samples, 1.1, 0)


def _wrong(wrapper: pyparallel.DataParallel) -> int:
    """Counts values of replicas that differ from the module's."""
    tensors = list(wrapper.module.state_dict().values())
    replicas = wrapper.replicate(wrapper.module, wrapper.device_ids)
    wrong = 0
    for replica in replicas:
        copies = replica.state_dict().values()
        wrong += sum(int((a != b).sum()) for a, b in zip(copies, tensors, strict=True))
    return wrong


def trainable_row(model: nn.Module, trainable: nn.Module, x: torch.Tensor, steps: int) -> Row:
    """Bytes sent in a step, in percent of the parameters of all ranks that get them."""
    model.requires_grad_(False)
    trainable.requires_grad_(True)
    wrapper = pyparallel.DataParallel(model, device_ids=pyparallel.virtual_devices(4))
    optimizer = torch.optim.SGD(trainable.parameters(), lr=0.001)
    whole = sum(p.nbytes for p in model.parameters()) * 3
    percent = []
    for _ in range(steps + 1):  # the first one sends everything
        optimizer.zero_grad()
        wrapper(x).square().sum().backward()
        optimizer.step()
        percent.append(wrapper.transfer_stats(reset=True)["bytes_sent"] / whole * 100)
    wrong = sum(not 0.5 < p < 100 for p in percent[1:]) + (percent[0] != 100)
    return measured("1 % trainable", 4, "bytes sent a step", "%", percent[1:], 1.5, wrong)
