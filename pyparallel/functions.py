"""Autograd functions whose forward is a collective and whose backward is its dual.

Broadcast and ReduceAdd are duals, and so are Scatter and Gather. Each backward applies the other
function, so all four can be differentiated any number of times.

On GPUs a backward runs on the streams that were current in forward, one for each rank, because
replicas compute their gradients there.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyparallel.absent_gradients import silence_hooks
from pyparallel.communicator import Communicator
from pyparallel.profiling import reducing

Rows = list[list[Tensor]]

# The engine runs the ready node with the highest number first. Nodes of buckets are created before
# those of the replicas; with their own numbers they would all run after the last gradient.
BUCKET_SEQUENCE_NUMBER = 2**62


def broadcast(communicator: Communicator, tensors: Sequence[Tensor]) -> Rows:
    """Copies the tensors of one bucket from rank 0 to all ranks, as one node of the graph.

    The node sums the gradients of all ranks as soon as they are there, while the rest of backward
    runs. A tensor for which no rank has a gradient gets none; one for which some have gets the sum
    of those.

    Args:
        communicator: Its rank 0 holds ``tensors``.
        tensors: Tensors of one dtype that require a gradient.

    Returns:
        ``[rank][k]``. Rank 0's tensors share the memory and the version counter of the inputs, so
        that writing an input before backward is noticed; the others have memory of their own.
    """
    outputs = apply(Broadcast, communicator, *tensors)
    set_sequence_number(outputs[0].grad_fn, BUCKET_SEQUENCE_NUMBER)
    return rows_of(outputs, len(tensors))


def set_sequence_number(node: Any, number: int) -> None:
    """Tells the autograd engine when to run a node: of those ready, the highest number first."""
    # Private. Where it is missing, sums are right but start after backward.
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(number)


def scatter(
    communicator: Communicator,
    root: int | None,
    chunk_sizes: Sequence[int],
    dim: int,
    tensor: Tensor,
) -> tuple[Tensor, ...]:
    """Cuts a tensor that requires a gradient; see ``Scatter``."""
    pieces: tuple[Tensor, ...] = apply(Scatter, communicator, root, chunk_sizes, dim, tensor)
    return pieces


def gather(
    communicator: Communicator, root: int | None, dim: int, tensors: Sequence[Tensor]
) -> Tensor:
    """Joins tensors; see ``Gather``."""
    joined: Tensor = apply(Gather, communicator, root, dim, *tensors)
    return joined


def reduce_add(
    communicator: Communicator, count: int, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Sums gradients of rank 0, rank 1, ..., differentiably; see ``ReduceAdd``."""
    sums: tuple[Tensor | None, ...] = apply(ReduceAdd, communicator, count, *grads)
    return sums


class Broadcast(Function):
    """(communicator, *tensors) -> copies of rank 0, of rank 1, ..."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies the tensors."""
        ctx.set_materialize_grads(False)
        ctx.communicator = communicator
        ctx.streams = current_streams_of(communicator)
        ctx.count = len(tensors)
        copies = communicator.broadcast(list(tensors))
        # detach, because autograd takes an input that is returned as it is for one of several views
        # of it, and then refuses to touch it once the input has been written.
        root = [tensor.detach() for tensor in tensors]
        return tuple(chain(root, *copies[1:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sums the gradients of all ranks."""
        with on_streams(ctx.streams), reducing():
            if torch.is_grad_enabled():
                sums = reduce_add(ctx.communicator, ctx.count, grads)
            else:
                # Without the function nobody else holds the sums, so .grad takes them without a
                # copy.
                sums = ctx.communicator.reduce_add(rows_of(grads, ctx.count))
        silence_hooks([node for node, _ in ctx.next_functions], sums)
        return (None, *sums)


class ReduceAdd(Function):
    """(communicator, count, *gradients of rank 0, of rank 1, ...) -> sums on rank 0.

    A gradient may be None, and a sum without gradients is None.
    """

    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, count: int, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Sums over ranks."""
        ctx.set_materialize_grads(False)
        ctx.communicator = communicator
        ctx.streams = current_streams_of(communicator)
        ctx.present = [grad is not None for grad in grads]
        return tuple(communicator.reduce_add(rows_of(grads, count)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Copies the gradients to the ranks that had a term."""
        count = len(grads)
        wanted = [k for k in range(count) if grads[k] is not None]
        result: list[Tensor | None] = [None] * len(ctx.present)
        if wanted:
            with on_streams(ctx.streams):
                copies = apply(Broadcast, ctx.communicator, *[grads[k] for k in wanted])
            for rank, row in enumerate(rows_of(copies, len(wanted))):
                for k, copy in zip(wanted, row, strict=True):
                    if ctx.present[rank * count + k]:
                        result[rank * count + k] = copy
        return (None, None, *result)


class Scatter(Function):
    """(communicator, root, chunk_sizes, dim, tensor) -> one piece a rank.

    ``root`` is the rank that holds the tensor, None for host memory of ranks on GPUs. A piece
    without a gradient counts as zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        communicator: Communicator,
        root: int | None,
        chunk_sizes: Sequence[int],
        dim: int,
        tensor: Tensor,
    ) -> tuple[Tensor, ...]:
        """Cuts the tensor."""
        ctx.communicator, ctx.root, ctx.dim = communicator, root, dim
        ctx.streams = current_streams_of(communicator)
        return tuple(communicator.scatter(tensor, chunk_sizes, dim=dim, root=root))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Joins the gradients of the pieces."""
        with on_streams(ctx.streams):
            grad = apply(Gather, ctx.communicator, ctx.root, ctx.dim, *grads)
        return None, None, None, None, grad


class Gather(Function):
    """(communicator, root, dim, *one tensor a rank) -> their concatenation on rank ``root``.

    With None for ``root`` it is in host memory.
    """

    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, root: int | None, dim: int, *tensors: Tensor
    ) -> Tensor:
        """Joins the tensors."""
        ctx.communicator, ctx.root, ctx.dim = communicator, root, dim
        ctx.streams = current_streams_of(communicator)
        result = communicator.gather(list(tensors), dim=dim, root=root)
        ctx.chunk_sizes = [tensor.size(dim) for tensor in tensors]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Cuts the gradient."""
        with on_streams(ctx.streams):
            pieces = apply(Scatter, ctx.communicator, ctx.root, ctx.chunk_sizes, ctx.dim, grad)
        return (None, None, None, *pieces)


def apply(function: type[Function], *args: Any) -> Any:
    """Calls an autograd function."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def rows_of(flat: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns ``[rank][k]`` of values in a row: those of rank 0, of rank 1, ..."""
    return [list(flat[start : start + count]) for start in range(0, len(flat), count)]


def current_streams_of(communicator: Communicator) -> list[torch.cuda.Stream]:
    """Returns one stream for each GPU; none for virtual devices."""
    devices = dict.fromkeys(communicator.devices)
    return [torch.cuda.current_stream(d.index) for d in devices if d.kind == "cuda"]


@contextmanager
def on_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Makes these the current streams of their devices, and the first one's device current."""
    with ExitStack() as stack:
        # Rank 0's comes last: entering a stream also makes its device the current one.
        for stream in reversed(streams):
            stack.enter_context(torch.cuda.stream(stream))
        yield
