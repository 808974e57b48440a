"""What the collectives are compared with: a plain copy, torch.cuda.comm, NCCL."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from ranks import Ranks
from timing import measure
from torch import Tensor

ITERATIONS, WARMUP = 20, 5


@dataclass(frozen=True)
class Copy:
    """A copy of one large tensor: inside of a device, and from GPU 0 to GPU 1 where there are two.

    Bytes per second. Inside of a device, bytes read and bytes written both count.
    """

    local_bytes_per_s: float
    link_bytes_per_s: float | None


def time_us(run: Callable[[], object], ranks: Ranks) -> float:
    return measure(run, ranks, ITERATIONS, WARMUP).median_us


def copies(ranks: Ranks, nbytes: int) -> Copy:
    first = ranks.devices[0]
    source = torch.ones(nbytes // 4, device=first)
    target = torch.empty_like(source)
    local = 2 * nbytes / time_us(lambda: target.copy_(source), ranks) * 1e6
    link = None
    if len(set(ranks.devices)) > 1:
        remote = torch.empty_like(source, device=ranks.devices[1])
        link = nbytes / time_us(lambda: remote.copy_(source), ranks) * 1e6
    return Copy(local, link)


def traffic(op: str, nranks: int, nbytes: int) -> float:
    """Bytes that any way to do it must read and write, all ranks in one memory."""
    factors = {
        "broadcast": nranks,  # read once, written by all but the root
        "reduce_add": nranks + 1,
        "scatter": 2 * (nranks - 1) / nranks,  # the root keeps its share where it is
        "gather": 2,
        "all_reduce": 2 * nranks,
    }
    return factors[op] * nbytes


def _tensors(ranks: Ranks, nbytes: int) -> list[Tensor]:
    return [torch.ones(nbytes // 4, device=device) for device in ranks.devices]


def cuda_comm(op: str, ranks: Ranks, nbytes: int) -> Callable[[], object] | None:
    """Returns the call of torch.cuda.comm, None where it has none or would not copy anything."""
    if ranks.devices[0].type != "cuda":
        return None
    shared = len(set(ranks.devices)) < len(ranks)
    devices = [d.index for d in ranks.devices]
    if op == "all_reduce" or (shared and op in ("broadcast", "scatter")):
        return None  # to a device that has the tensor, it gives the tensor itself
    tensors = _tensors(ranks, nbytes)
    if op == "broadcast":
        return lambda: torch.cuda.comm.broadcast(tensors[0], devices)
    if op == "scatter":
        return lambda: torch.cuda.comm.scatter(tensors[0], devices)
    if op == "gather":
        pieces = [t[: len(t) // len(tensors)] for t in tensors]
        return lambda: torch.cuda.comm.gather(pieces, destination=devices[0])
    return lambda: torch.cuda.comm.reduce_add(tensors, devices[0])


def nccl(op: str, ranks: Ranks, nbytes: int) -> Callable[[], object] | None:
    """Returns the call of NCCL, None where it has none; it allows one rank on each GPU."""
    distinct = len(set(ranks.devices)) == len(ranks) > 1
    if not distinct or ranks.devices[0].type != "cuda" or op in ("scatter", "gather"):
        return None
    from torch.cuda import nccl as library

    tensors = _tensors(ranks, nbytes)
    if not library.is_available(tensors):
        return None
    outputs = [torch.empty_like(t) for t in tensors]
    if op == "broadcast":
        return lambda: library.broadcast(tensors)
    if op == "reduce_add":
        return lambda: library.reduce(tensors, outputs[0])
    return lambda: library.all_reduce(tensors, outputs)
