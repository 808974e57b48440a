"""The two autograd nodes of a bucket, which persist: parameters -> gate -> bucket -> replicas.

Both save nothing, so any number of forwards may use the outputs and any number of backwards may run
the nodes. The bucket's backward launches the sum as soon as all gradients are there, while the rest
of backward runs. The gate's waits for it. The engine runs the gate when nothing else is ready, but
always before the gradients are accumulated, added to others, or seen by hooks.

On GPUs both nodes belong to the side stream of rank 0: autograd runs a node's backward on the
stream that was current in its forward, and lets whoever uses its results on another stream wait for
that one. So nothing that computes waits for a sum before backward has ended. Not yet run on a GPU.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyparallel.absent_gradients import silence_hooks
from pyparallel.functions import (
    BUCKET_SEQUENCE_NUMBER,
    Rows,
    apply,
    on_streams,
    reduce_add,
    rows_of,
    set_sequence_number,
)
from pyparallel.gradient_bucket import GradientBucket
from pyparallel.profiling import reducing


class BucketNodes:
    """The nodes of one bucket, and their outputs.

    Attributes:
        rows: ``[rank][k]``, the outputs. Those of rank 0 share memory and version counter with the
            parameters, so that writing a parameter before backward is noticed.
        bucket: Sums the gradients.
    """

    def __init__(self, bucket: GradientBucket, parameters: Sequence[Tensor], aliases: Rows) -> None:
        """Makes the nodes.

        Args:
            bucket: Sums the gradients.
            parameters: Rank 0's.
            aliases: ``[rank >= 1][k]``, unused tensors without gradient, which become the outputs.
        """
        self.bucket = bucket
        with bucket.side.on_root(), torch.inference_mode(False), torch.enable_grad():
            gated = apply(Gate, bucket, *parameters)
            outputs = apply(Bucket, bucket, list(chain.from_iterable(aliases)), *gated)
        self._gate = gated[0].grad_fn
        self._gate_number: int | None = None
        self._streams: Sequence[torch.cuda.Stream] = ()
        self._node = outputs[0].grad_fn
        set_sequence_number(self._node, BUCKET_SEQUENCE_NUMBER)
        self.rows: Rows = rows_of(outputs, len(parameters))

    def prepare(self, gate_number: int, streams: Sequence[torch.cuda.Stream]) -> None:
        """Sets what the next backward needs: when the gate runs, and where replicas compute."""
        # Of each bucket at each forward, so attributes of the node are written only if they change.
        if gate_number != self._gate_number:
            set_sequence_number(self._gate, gate_number)
            self._gate_number = gate_number
        if streams != self._streams:
            self._node.streams = self._streams = streams

    @property
    def hooked(self) -> bool:
        """Whether the user registered a hook on an output."""
        hooked: bool = self._node.hooked
        return hooked


class Gate(Function):
    """(bucket, *tensors) -> the same tensors; see the module."""

    @staticmethod
    def forward(ctx: Any, bucket: GradientBucket, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Passes the tensors on."""
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Waits for the sums."""
        with reducing():
            ctx.bucket.wait()
        silence_hooks([leaf for leaf, _ in ctx.next_functions], grads)
        return (None, *grads)


class Bucket(Function):
    """(bucket, copies of rank 1, ..., *tensors of rank 0) -> tensors of rank 0, rank 1, ..."""

    @staticmethod
    def forward(
        ctx: Any, bucket: GradientBucket, copies: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Joins them. Nothing is copied here."""
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        ctx.hooked = False
        ctx.streams = ()
        # detach, because autograd takes an input that is returned as it is for one of several views
        # of it, and then refuses to touch it once the input has been written.
        return (*[tensor.detach() for tensor in tensors], *copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launches the sum of the gradients of all ranks."""
        bucket: GradientBucket = ctx.bucket
        with on_streams(ctx.streams), reducing():
            if torch.is_grad_enabled():
                differentiable = reduce_add(bucket.communicator, bucket.count, grads)
                bucket.side.follow(differentiable)
                return (None, None, *differentiable)
            gate = ctx.next_functions[0][0]
            leaves = [leaf for leaf, _ in gate.next_functions]
            terms, to_sum = bucket.accumulation.exchange(leaves, grads)
            if not to_sum:
                bucket.side.follow(terms)
                return (None, None, *terms)
            sums = bucket.launch(terms)
            if torch.is_anomaly_enabled():  # it looks at what this node returns
                bucket.wait()
            return (None, None, *sums)


_BucketNode: Any = Bucket._backward_cls


def _notice_hook(node: Any, output: Tensor) -> None:
    node.hooked = True
    super(_BucketNode, node)._register_hook_dict(output)


# Tensor.register_hook calls this method of the tensor's node. A hook on an output must not see the
# gradients of later forwards, so outputs with hooks are not used again.
_BucketNode._register_hook_dict = _notice_hook
