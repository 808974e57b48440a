"""The five collectives as benchmark cases: buffers, a call of the core, the result in closed form.

Element i of rank r holds ``(base[i] + r) % 8`` with a fixed random base. Sums of up to 16 such
values are small integers, so every type holds them exactly and a right result is right in every
bit, whatever the order of additions.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from ranks import Buffer, Ranks
from torch import Tensor

from pyparallel import _C


@dataclass(frozen=True)
class Shape:
    """What to move: ``count`` is the elements of the whole buffer, which scatter and gather cut."""

    root: int
    count: int
    dtype: torch.dtype
    unalign: int


class Case:
    """One collective on preallocated buffers. ``run`` launches it; it does not allocate."""

    def __init__(
        self,
        run: Callable[[], None],
        inputs: list[tuple[Buffer, Tensor]],
        outputs: list[tuple[Buffer, Tensor]],
    ) -> None:
        self.run = run
        self._inputs = inputs
        self._outputs = outputs
        self.reset()

    def reset(self) -> None:
        """Poisons the outputs, then writes the inputs: in place they are the same buffers."""
        for buffer, _ in self._outputs:
            buffer.fill(None)
        for buffer, values in self._inputs:
            buffer.fill(values)

    @property
    def inputs(self) -> list[Buffer]:
        return [buffer for buffer, _ in self._inputs]

    @property
    def outputs(self) -> list[Buffer]:
        return [buffer for buffer, _ in self._outputs]

    def wrong(self) -> int:
        """Counts wrong values in all outputs, and writes outside of them."""
        return sum(buffer.wrong(expected) for buffer, expected in self._outputs)


@dataclass(frozen=True)
class Operation:
    """A collective: its algorithms, its busbw factor for n ranks, and how to build its case."""

    name: str
    algorithms: tuple[str, ...]
    busbw_factor: Callable[[int], float]
    build: Callable[[Ranks, Shape, str], Case]
    build_in_place: Callable[[Ranks, Shape, str], Case] | None = None
    reduces: bool = False
    rooted: bool = True

    def limit(self, algorithm: str) -> float:
        """Returns the largest payload in bytes that an algorithm carries."""
        _, limit = _C.algorithms().get(self.name, {}).get(algorithm, ("", None))
        return float("inf") if limit is None else limit


@functools.lru_cache(maxsize=1)
def _base(count: int) -> Tensor:
    return torch.randint(8, (count,), dtype=torch.int8, generator=torch.Generator().manual_seed(1))


def rank_values(rank: int, count: int) -> Tensor:
    """Returns the values of a rank's input."""
    return (_base(count) + rank).bitwise_and_(7)


def rank_sums(nranks: int, count: int) -> Tensor:
    """Returns the sums of all ranks' inputs."""
    total = torch.zeros(count, dtype=torch.int8)  # at most 16 * 7
    for rank in range(nranks):
        total += rank_values(rank, count)
    return total


def _buffers(ranks: Ranks, shape: Shape, counts: list[int]) -> list[Buffer]:
    return [
        Buffer(d, n, shape.dtype, shape.unalign) for d, n in zip(ranks.devices, counts, strict=True)
    ]


def _shares(nranks: int, count: int) -> list[slice]:
    """Cuts ``count`` elements into one share a rank; they differ by at most one element."""
    return [slice(r * count // nranks, (r + 1) * count // nranks) for r in range(nranks)]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _broadcast(ranks: Ranks, shape: Shape, algorithm: str) -> Case:
    buffers = _buffers(ranks, shape, [shape.count] * len(ranks))
    source = buffers[shape.root]
    sources, sizes = [source.pointer], [source.nbytes]
    destinations = [0 if buffer is source else buffer.pointer for buffer in buffers]

    def run() -> None:
        ranks.core.broadcast(
            shape.root, sources, [0], sizes, destinations, ranks.streams, algorithm
        )

    values = rank_values(shape.root, shape.count)
    return Case(run, [(source, values)], [(b, values) for b in buffers if b is not source])


def _reduce_add(ranks: Ranks, shape: Shape, algorithm: str) -> Case:
    buffers = _buffers(ranks, shape, [shape.count] * len(ranks))
    total = Buffer(ranks.devices[shape.root], shape.count, shape.dtype, shape.unalign)
    sources, sizes, name = [[b.pointer] for b in buffers], [total.nbytes], _dtype_name(shape.dtype)
    destination = total.pointer

    def run() -> None:
        ranks.core.reduce_add(
            shape.root, sources, [0], sizes, destination, name, ranks.streams, algorithm
        )

    inputs = [(b, rank_values(rank, shape.count)) for rank, b in enumerate(buffers)]
    return Case(run, inputs, [(total, rank_sums(len(ranks), shape.count))])


def _all_reduce_between(
    ranks: Ranks, shape: Shape, algorithm: str, inputs: list[Buffer], outputs: list[Buffer]
) -> Case:
    sources, destinations = [b.pointer for b in inputs], [b.pointer for b in outputs]
    name = _dtype_name(shape.dtype)

    def run() -> None:
        ranks.core.all_reduce(sources, destinations, shape.count, name, ranks.streams, algorithm)

    total = rank_sums(len(ranks), shape.count)
    values = [(b, rank_values(rank, shape.count)) for rank, b in enumerate(inputs)]
    return Case(run, values, [(b, total) for b in outputs])


def _all_reduce(ranks: Ranks, shape: Shape, algorithm: str) -> Case:
    counts = [shape.count] * len(ranks)
    return _all_reduce_between(
        ranks, shape, algorithm, _buffers(ranks, shape, counts), _buffers(ranks, shape, counts)
    )


def _all_reduce_in_place(ranks: Ranks, shape: Shape, algorithm: str) -> Case:
    buffers = _buffers(ranks, shape, [shape.count] * len(ranks))
    return _all_reduce_between(ranks, shape, algorithm, buffers, buffers)


def _scatter(ranks: Ranks, shape: Shape, algorithm: str) -> Case:
    del algorithm  # there is one
    shares = _shares(len(ranks), shape.count)
    source = Buffer(ranks.devices[shape.root], shape.count, shape.dtype, shape.unalign)
    pieces = _buffers(ranks, shape, [s.stop - s.start for s in shares])
    size = shape.dtype.itemsize
    offsets, sizes = [s.start * size for s in shares], [b.nbytes for b in pieces]
    # The root's own share is a view of its input in the public API: nothing moves.
    destinations = [0 if rank == shape.root else b.pointer for rank, b in enumerate(pieces)]

    def run() -> None:
        ranks.core.scatter(
            shape.root,
            source.pointer,
            1,
            source.nbytes,
            offsets,
            sizes,
            destinations,
            ranks.streams,
        )

    values = rank_values(shape.root, shape.count)
    outputs = [
        (b, values[s])
        for rank, (b, s) in enumerate(zip(pieces, shares, strict=True))
        if rank != shape.root
    ]
    return Case(run, [(source, values)], outputs)


def _gather(ranks: Ranks, shape: Shape, algorithm: str) -> Case:
    del algorithm  # there is one
    shares = _shares(len(ranks), shape.count)
    target = Buffer(ranks.devices[shape.root], shape.count, shape.dtype, shape.unalign)
    pieces = _buffers(ranks, shape, [s.stop - s.start for s in shares])
    size = shape.dtype.itemsize
    offsets, sizes, sources = (
        [s.start * size for s in shares],
        [b.nbytes for b in pieces],
        [b.pointer for b in pieces],
    )

    def run() -> None:
        ranks.core.gather(
            shape.root, sources, 1, target.nbytes, offsets, sizes, target.pointer, ranks.streams
        )

    values = [rank_values(rank, shape.count)[s] for rank, s in enumerate(shares)]
    return Case(run, list(zip(pieces, values, strict=True)), [(target, torch.cat(values))])


def _part(nranks: int) -> float:
    return (nranks - 1) / nranks  # the share of the root's buffer that crosses a link


_NAMES = {collective: tuple(names) for collective, names in _C.algorithms().items()}
OPERATIONS = {
    op.name: op
    for op in (
        Operation("broadcast", _NAMES["broadcast"], lambda _: 1.0, _broadcast),
        Operation("reduce_add", _NAMES["reduce_add"], lambda _: 1.0, _reduce_add, reduces=True),
        Operation("scatter", ("direct",), _part, _scatter),
        Operation("gather", ("direct",), _part, _gather),
        Operation(
            "all_reduce",
            _NAMES["all_reduce"],
            lambda n: 2 * _part(n),
            _all_reduce,
            _all_reduce_in_place,
            reduces=True,
            rooted=False,
        ),
    )
}
