"""Ours against torch.distributed with gloo: four virtual devices against four processes.

Both move the same values between memory that is there, in turns. A round of one side is some calls
one after the other; gloo's processes meet at a barrier before, and the time is that of the slowest.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from bars import Line, Sample, in_turns, median_ms, quartiles, ratios
from operations import OPERATIONS, Shape, rank_sums, rank_values
from ranks import Ranks
from torch import Tensor

NRANKS = 4
TIMEOUT_S = 120
COUNTERPARTS: dict[str, Callable[[Tensor], object]] = {
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "reduce_add": lambda tensor: dist.reduce(tensor, 0),
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
}


@dataclass(frozen=True)
class Size:
    """``bar``: the least ratio. ``calls`` one after the other in each of ``rounds``."""

    nbytes: int
    bar: float
    rounds: int
    calls: int


def gloo_lines(sizes: list[Size]) -> list[Line]:
    ranks = Ranks("cpu", NRANKS, timeout_s=60)
    with _processes() as connections:
        return [_line(ranks, connections, name, size) for size in sizes for name in COUNTERPARTS]


def _line(ranks: Ranks, connections: list[Connection], name: str, size: Size) -> Line:
    count = size.nbytes // 4
    shape = Shape(root=0, count=count, dtype=torch.float32, unalign=0)
    operation = OPERATIONS[name]
    # In place where that is possible, as gloo.
    case = (operation.build_in_place or operation.build)(ranks, shape, "auto")
    case.run()
    wrong = case.wrong() + _theirs(connections, name, count, 1)[1]

    def ours() -> Sample:
        case.reset()
        start = time.perf_counter()
        for _ in range(size.calls):
            case.run()
        return Sample((time.perf_counter() - start) / size.calls, cpu=0)

    def theirs() -> Sample:
        return Sample(_theirs(connections, name, count, size.calls)[0], cpu=0)

    samples = in_turns({"gloo": theirs, "ours": ours}, size.rounds)
    gloo_ms, ours_ms = median_ms(samples["gloo"]), median_ms(samples["ours"])
    return Line(
        name=f"gloo / {name} of {size.nbytes} bytes",
        unit="x",
        quartiles=quartiles(ratios(samples["gloo"], samples["ours"])),
        bar=size.bar,
        higher_is_better=True,
        wrong=wrong,
        note=f"gloo {gloo_ms:.3f} ms, ours {ours_ms:.4f} ms",
    )


def _theirs(connections: list[Connection], name: str, count: int, calls: int) -> tuple[float, int]:
    """Runs an operation in all processes; returns seconds a call and, of one call, wrong values."""
    for connection in connections:
        connection.send((name, count, calls))
    replies = []
    for rank, connection in enumerate(connections):
        if not connection.poll(TIMEOUT_S):
            raise RuntimeError(f"gloo: {name} of {count} elements: rank {rank} does not answer")
        replies.append(connection.recv())
    return max(seconds for seconds, _ in replies), sum(wrong for _, wrong in replies)


@contextlib.contextmanager
def _processes() -> Iterator[list[Connection]]:
    """One process a rank, asleep between operations."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(NRANKS)]
        processes = [
            context.Process(target=serve, args=(rank, str(Path(folder, "store")), pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that recv() ends with the process
        try:
            yield [ours for ours, _ in pipes]
        finally:
            for ours, _ in pipes:
                ours.close()
            for process in processes:
                process.join(10)
                process.kill()


def serve(rank: int, store: str, connection: Connection) -> None:
    """Runs operations until the other side closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a host may have no address
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NRANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    with contextlib.suppress(EOFError):
        while True:
            name, count, calls = connection.recv()
            tensor = rank_values(rank, count).float()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                COUNTERPARTS[name](tensor)
            seconds = (time.perf_counter() - start) / calls
            checked = calls == 1 and (name != "reduce_add" or rank == 0)
            connection.send((seconds, _wrong(tensor, name) if checked else 0))
    dist.destroy_process_group()


def _wrong(result: Tensor, name: str) -> int:
    count = result.numel()
    right = rank_values(0, count) if name == "broadcast" else rank_sums(NRANKS, count)
    return int((result != right).sum())
