"""The step engine of one wrapper: replicas that persist, and what each forward renews of them."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.accumulation import Accumulation
from pyparallel.bucket import assign_buckets
from pyparallel.communicator import get_communicator
from pyparallel.detection import ModuleState, look
from pyparallel.devices import Device
from pyparallel.forward_ad import refuse_tangents
from pyparallel.functions import BUCKET_SEQUENCE_NUMBER, current_streams_of
from pyparallel.owned import OwnedTensors, accounted
from pyparallel.rank_memory import RankMemory
from pyparallel.rank_values import RankValues, RecordedValues
from pyparallel.replicate import check_not_modified, replicate
from pyparallel.tree_pool import TreePool


class Engine:
    """Gives out replicas of a module.

    The replicas are those that ``replicate`` would make. But modules, memory and autograd nodes
    persist, and each forward renews only what changed: attributes of modules, bytes of tensors,
    nodes whose parameters are other ones. A module that cannot be treated so (a ScriptModule, one
    with a way of its own to be replicated, sparse or strided parameters, weights computed by
    autograd) is replicated afresh each time.

    Args:
        module: All its tensors are on ``devices[0]``.
        devices: The device of each rank.
        bucket_bytes: Limit of a bucket; None for the default.
        always_send: Send tensors that did not change, too.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device],
        bucket_bytes: int | None,
        always_send: bool,
    ) -> None:
        self.module = module
        self.devices = tuple(devices)
        self.device_ids = [device.index for device in devices]
        self.pid = os.getpid()
        self._bucket_bytes = bucket_bytes
        self._always_send = always_send
        self._communicator = get_communicator(devices)
        self._accumulation = Accumulation(self._communicator)
        self._lock = threading.RLock()
        self._state: ModuleState | None = None
        self._layout: Any = None
        self._memories: list[RankMemory] = []
        self._plain: RankValues | None = None
        self._recorded: RecordedValues | None = None
        self._trees = TreePool()
        self._owned: list[OwnedTensors] = []
        # What is gone, until its references are no longer counted as ours.
        self._retired: list[Any] = []
        self._transferred = (0, 0)  # by memories that are gone

    def replicas(self, count: int) -> list[nn.Module]:
        """Returns replicas for the first ranks, which pass gradients on if they are enabled.

        They are free to be used again when the list is gone, and everything else that refers to
        them; see ``release``.

        Raises:
            RuntimeError: A tensor is not on the first device, or Python modules are below a
                ScriptModule.
        """
        refuse_tangents("broadcast", (tensor for _, tensor in _named_tensors(self.module)))
        with self._lock:
            try:
                return self._take(count)
            except BaseException:
                self._start_over()
                raise

    def release(self, replicas: list[nn.Module]) -> None:
        """Undoes what forward wrote to the replicas; the caller has no other reference to them."""
        with self._lock:
            tree = self._trees.find(replicas[0]) if replicas else None
            if tree is not None:
                try:
                    tree.release(len(replicas))
                    for memory in self._memories:
                        memory.check()
                except BaseException:
                    self._start_over()
                    raise

    def check_not_modified(self, replica: nn.Module) -> None:
        """Refuses a forward that wrote a parameter in place while autograd recorded.

        Args:
            replica: Rank 0's.

        Raises:
            RuntimeError: Names the parameter.
        """
        with self._lock:
            tree = self._trees.find(replica)
            if tree is None:
                check_not_modified(replica)
            elif isinstance(tree.values, RecordedValues):
                k = tree.values.modified_root()
                if k is not None:
                    assert self._state is not None
                    modified = self._state.tensors[k]
                    name = next(n for n, p in _named_tensors(self.module) if p is modified)
                    raise RuntimeError(
                        "a leaf Variable that requires grad is being used in an in-place "
                        f"operation: forward modified the parameter {name!r}; use torch.no_grad() "
                        "or a copy of it"
                    )

    def no_sync(self) -> AbstractContextManager[None]:
        """Keeps gradients on the ranks meanwhile; see ``DataParallel.no_sync``."""
        return self._accumulation.on()

    def transferred(self) -> tuple[int, int]:
        """Returns the bytes of tensors sent to ranks so far, and those that were there already."""
        with self._lock:
            counts = [self._transferred, *(memory.transferred() for memory in self._memories)]
            return sum(sent for sent, _ in counts), sum(skipped for _, skipped in counts)

    def _take(self, count: int) -> list[nn.Module]:
        if not self._look():
            detach = not torch.is_grad_enabled()
            return replicate(self.module, self.devices[:count], detach)
        self._send()
        recording = torch.is_grad_enabled() and any(m.trainable for m in self._memories)
        values = self._recorded if recording else self._plain
        tree = None if values is None else self._trees.take_ready(values)
        if tree is None:
            with accounted(self._owned):
                self._retired.clear()
                values = self._make_values(recording)
                present = [v for v in (self._plain, self._recorded) if v is not None]
                assert self._state is not None
                tree = self._trees.take(self._state, values, present)
        if recording:
            self._prepare_buckets()
        return tree.roots[:count]

    def _start_over(self) -> None:
        """Forgets all replicas and memory: an error or an interrupt may have come half way.

        Graphs and replicas in use keep what they need.
        """
        self._state = self._layout = None
        self._trees = TreePool()
        self._transferred = self.transferred()
        self._memories = []
        self._plain = self._recorded = None
        self._owned = []
        self._retired = []

    def _look(self) -> bool:
        """Finds out what changed. Returns whether replicas of the module can be kept."""
        changes = None if self._state is None else self._state.changes()
        state = self._state
        if state is not None and changes is not None:
            modules, tensors = changes
            if modules:
                self._trees.mark_stale(modules)
            for k in tensors:
                self._copy_attributes(k)
            if not state.memory_changed():
                return True
        check_module_device(self.module, self.devices[0].torch_device)
        seen = look(self.module)
        if seen is None:
            return False
        if state is None or changes is None:
            self._trees.abandon()
            self._retired.append(self._trees)
            self._trees = TreePool()
        else:
            seen = state
            state.look_at_memory()
        self._set_memories(seen)
        self._state = seen
        return True

    def _set_memories(self, state: ModuleState) -> None:
        self._drop_recorded()
        self._drop_plain()
        buckets = assign_buckets(state.tensors, self._bucket_bytes)
        groups = _memory_groups(state, buckets)
        kinds = [(type(t), t.dtype, t.requires_grad, t.size(), t.stride()) for t in state.tensors]
        if (kinds, groups) == self._layout:
            for memory in self._memories:
                memory.rebase([state.tensors[k] for k in memory.members])
                for i in range(len(memory.members)):
                    memory.copy_attributes(i)
            return
        self._transferred = self.transferred()
        self._memories = []
        self._layout = None
        self._buckets = [b for b in buckets if state.tensors[b[0]].requires_grad]
        self._memories = [
            RankMemory(self._communicator, members, [state.tensors[k] for k in members], written)
            for members, written in groups
        ]
        self._layout = kinds, groups

    def _send(self) -> None:
        if self._recorded is not None and self._recorded.touched():
            self._drop_recorded()
            for memory in self._memories:
                if memory.trainable:
                    memory.spoil()
        for memory in self._memories:
            renewed = memory.displaced()
            if renewed:
                memory.renew()
            if memory.send(self._always_send, self._in_use) or renewed:
                self._drop_plain()
                self._drop_recorded()

    def _in_use(self, memory: RankMemory) -> bool:
        outputs = self._recorded
        return self._trees.in_use(memory.owned) or (
            memory.trainable and outputs is not None and outputs.owned.held()
        )

    def _make_values(self, recording: bool) -> RankValues:
        state = self._state
        assert state is not None
        if recording and self._recorded is None:
            self._recorded = RecordedValues(
                self._memories,
                state.tensors,
                self._buckets,
                self._communicator,
                self._accumulation,
            )
        elif not recording and self._plain is None:
            self._plain = RankValues(self._memories, state.tensors, len(self.devices))
        self._owned[:] = [memory.owned for memory in self._memories]
        if self._recorded is not None:
            self._owned.append(self._recorded.owned)
        values = self._recorded if recording else self._plain
        assert values is not None
        return values

    def _drop_recorded(self) -> None:
        if self._recorded is not None:
            self._recorded.drop()
            self._retired.append(self._recorded)
            self._recorded = None

    def _drop_plain(self) -> None:
        self._retired.append(self._plain)
        self._plain = None

    def _copy_attributes(self, k: int) -> None:
        state = self._state
        assert state is not None
        for memory in self._memories:
            if k in memory.members:
                memory.copy_attributes(memory.members.index(k))
        if self._recorded is not None:
            self._recorded.copy_attributes(k, state.tensors[k])

    def _prepare_buckets(self) -> None:
        assert self._recorded is not None
        buckets = self._recorded.buckets
        # The all-reduce of DDP around us starts when a bucket's gradients have passed the gate. So
        # there the gate comes right behind its bucket; else it waits as long as it can.
        inside_ddp = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
        streams = current_streams_of(self._communicator)
        for i, nodes in enumerate(buckets):
            nodes.prepare(BUCKET_SEQUENCE_NUMBER - 1 if inside_ddp else len(buckets) - i, streams)


def _memory_groups(
    state: ModuleState, buckets: Sequence[Sequence[int]]
) -> list[tuple[list[int], bool]]:
    """Returns the tensors that share a flat buffer, and whether forward writes them."""
    buffers = {k for entries in state.entries for kind, _, k in entries if kind == "_buffers"}
    groups: dict[Any, tuple[list[int], bool]] = {}
    for bucket in buckets:
        for k in bucket:
            tensor = state.tensors[k]
            # Buffers apart from frozen parameters, for which there is nothing to be done as a rule.
            written = k in buffers and not tensor.requires_grad
            kind = tensor.dtype, tensor.requires_grad, written
            groups.setdefault(kind, ([], written))[0].append(k)
    return list(groups.values())


def check_module_device(module: nn.Module, device: torch.device) -> None:
    """Raises RuntimeError unless all parameters and buffers are on ``device``."""
    for _, tensor in _named_tensors(module):
        if tensor.device != device:
            raise RuntimeError(
                "module must have its parameters and buffers on device "
                f"{device} (device_ids[0]) but found one of them on device: {tensor.device}"
            )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
