"""The tensors that replicas hold: one row a rank, made once and used by many forwards."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyparallel import _C
from pyparallel.accumulation import Accumulation
from pyparallel.bucket_functions import BucketNodes
from pyparallel.communicator import Communicator
from pyparallel.functions import Rows
from pyparallel.gradient_bucket import GradientBucket
from pyparallel.owned import OwnedTensors
from pyparallel.rank_memory import RankMemory
from pyparallel.shells import as_type_of, copy_attributes
from pyparallel.tensor_layouts import layouts_of

_Tensor: Any = torch._C.TensorBase


class RankValues:
    """Without gradients: the module's own tensors on rank 0, the copies in memory on the others.

    Attributes:
        rows: ``[rank][k]`` for each tensor k of the module.
        copies: The tensors of each memory to which these belong.
    """

    def __init__(
        self, memories: Sequence[RankMemory], tensors: Sequence[Tensor], nranks: int
    ) -> None:
        self.copies = [memory.owned for memory in memories]
        self.rows: Rows = [list(tensors) for _ in range(nranks)]
        for memory in memories:
            for row, copies in zip(self.rows, memory.copies, strict=True):
                for k, copy in zip(memory.members, copies, strict=True):
                    row[k] = copy


class RecordedValues(RankValues):
    """With gradients: in place of trainable tensors the outputs of buckets.

    Attributes:
        buckets: The nodes of each bucket, in the order in which backward completes them.
        owned: The outputs of ranks >= 1.
    """

    def __init__(
        self,
        memories: Sequence[RankMemory],
        tensors: Sequence[Tensor],
        buckets: Sequence[Sequence[int]],
        communicator: Communicator,
        accumulation: Accumulation,
    ) -> None:
        super().__init__(memories, tensors, len(communicator.devices))
        self._memories = [memory for memory in memories if memory.trainable]
        place = {k: (memory, i) for memory in self._memories for i, k in enumerate(memory.members)}
        self.buckets: list[BucketNodes] = []
        for members in buckets:
            memory = place[members[0]][0]
            parameters = [tensors[k] for k in members]
            aliases = memory.aliases([place[k][1] for k in members])
            bucket = GradientBucket(communicator, parameters, accumulation)
            nodes = BucketNodes(bucket, parameters, aliases)
            self.buckets.append(nodes)
            for rank, outputs in enumerate(nodes.rows):
                for k, output in zip(members, outputs, strict=True):
                    self.rows[rank][k] = as_type_of(tensors[k], output)
        self._watch()

    def _watch(self) -> None:
        self._trainable = list(chain.from_iterable(memory.members for memory in self._memories))
        self._position = {k: i for i, k in enumerate(self._trainable)}
        root, *others = ([row[k] for k in self._trainable] for row in self.rows)
        self._others = list(chain.from_iterable(others))
        self.owned = OwnedTensors(self._others)
        # What the forward of one rank does to its tensors the others do too, so most is watched on
        # rank 0 only. But what is done because of the data may happen on any rank.
        self._attributes = _C.IdentitySnapshot(root)
        self._root = _C.AttributeSnapshot(root, [_Tensor.grad_fn, _Tensor.retains_grad])
        self._root_layouts = layouts_of(root)
        self._versions = _C.AttributeSnapshot(self._others, [_Tensor._version])
        self._layouts = layouts_of(self._others)

    def touched(self) -> bool:
        """Whether the user changed an output in a way that the next forward must not see.

        In place, by another memory, by a hook, or by a Python attribute.
        """
        return (
            self._root.check() != -1
            or self._root_layouts.check() != -1
            or self._versions.check() != -1
            or self._attributes.check() != -1
            or any(nodes.hooked for nodes in self.buckets)
            # An output that was moved elsewhere has left our memory.
            or (
                any(memory.memory_held() for memory in self._memories)
                and self._layouts.check() != -1
            )
        )

    def copy_attributes(self, k: int, original: Tensor) -> None:
        """Gives all copies of a tensor the Python attributes of the original."""
        if k in self._position:
            for row in self.rows:
                copy_attributes(original, row[k])
            self._attributes.update(self._position[k])

    def modified_root(self) -> int | None:
        """Returns the position of a tensor that rank 0 wrote in place with autograd recording."""
        if self._root.check() != -1:
            nodes = {id(n.rows[0][0].grad_fn) for n in self.buckets if n.rows[0]}
            for k in self._trainable:
                if id(self.rows[0][k].grad_fn) not in nodes:
                    return k
        return None

    def drop(self) -> None:
        """Counts the outputs no longer as ours; replicas or graphs may still use them."""
        for memory in self._memories:
            memory.forget(len(memory.members))
