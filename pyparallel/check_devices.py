"""Finds replicas on virtual devices that use the memory of another device.

On GPUs torch refuses an operator on tensors of two devices. All virtual devices are the CPU, so
there a replica that takes a weight of another one's would go unseen. With
PYPARALLEL_CHECK_DEVICES=1 a dispatch mode looks at every operator of every replica.

Seen are views, in-place operators and everything else that torch dispatches, from the start to the
end of a replica's forward. Not seen: what compiled code does inside, operators in backward (also
recomputation by checkpointing), memory that NumPy or a kernel of the user's touches by itself, and
memory that is neither a parameter, nor a buffer, nor an input of a replica.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pyparallel.devices import Device


class MemoryOwners:
    """Which memory belongs to which rank during one call of ``parallel_apply``.

    It is that of the parameters and buffers of the rank's replica, and of its inputs. Memory that
    ranks of several devices have in common belongs to none: an own ``scatter`` may pass on views
    of one tensor, which ``.to(device)`` did not copy because they are all on the CPU.
    """

    def __init__(
        self, modules: Sequence[nn.Module], arguments: Sequence[Any], devices: Sequence[Device]
    ) -> None:
        self.devices = devices
        # The tensors are kept too, so that no other memory gets the same address.
        self._owners: dict[int, tuple[int, str, Tensor] | None] = {}
        for rank, (module, values) in enumerate(zip(modules, arguments, strict=True)):
            for name, tensor in _own_tensors(module):
                self._add(rank, f"its {name!r}", tensor)
            for value in tree_iter(values):
                if isinstance(value, Tensor):
                    self._add(rank, "its input", value)

    def _add(self, rank: int, what: str, tensor: Tensor) -> None:
        address = _address(tensor)
        if address:
            owner = self._owners.setdefault(address, (rank, what, tensor))
            if owner is not None and self.devices[owner[0]] != self.devices[rank]:
                self._owners[address] = None

    def checked(self, rank: int) -> AbstractContextManager[None]:
        """Checks the operators that the calling thread runs for a rank.

        Raises:
            RuntimeError: From an operator: a tensor among its arguments belongs to a rank of
                another device.
        """
        return _Checked(self, rank)

    def check(self, rank: int, operator: object, arguments: object) -> None:
        """Raises RuntimeError if ``rank`` must not touch a tensor among the arguments."""
        for value in tree_iter(arguments):
            owner = self._owners.get(_address(value)) if isinstance(value, Tensor) else None
            if owner is None or self.devices[owner[0]] == self.devices[rank]:
                continue
            if not _called_by_us():
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but "
                    f"{operator} in replica {rank} on {self.devices[rank]} touches memory of "
                    f"replica {owner[0]} on {self.devices[owner[0]]}: {owner[1]} "
                    "(found by PYPARALLEL_CHECK_DEVICES)"
                )


class _Checked:
    # Not contextlib.contextmanager, which assigns to exceptions: some classes refuse that.
    def __init__(self, memory: MemoryOwners, rank: int) -> None:
        self._mode = _mode_class()(memory, rank)  # the stack of torch 2.6 does not own it

    def __enter__(self) -> None:
        # Not "with mode": that sets a flag of the process, and two threads would leave it set.
        torch._C._push_on_torch_dispatch_stack(self._mode)

    def __exit__(self, *error: Any) -> None:
        torch._C._pop_torch_dispatch_stack(None)


class _CheckMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, memory: MemoryOwners, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._rank = rank

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports dynamo, which takes seconds; see _mode_class.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leaves torch.compile switched on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._memory.check(self._rank, func, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _mode_class() -> type[_CheckMode]:
    return _uncompiled_mode_class() if "torch._dynamo" in sys.modules else _CheckMode


@functools.cache
def _uncompiled_mode_class() -> type[_CheckMode]:
    """Keeps dynamo, which compiles what compiled code calls, out of the check."""
    check = torch.compiler.disable(_CheckMode.__torch_dispatch__)  # type: ignore[no-untyped-call]
    return type("_UncompiledCheckMode", (_CheckMode,), {"__torch_dispatch__": check})


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for name, tensor in chain(child._parameters.items(), child._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _address(tensor: Tensor) -> int:
    """Where the memory starts that a tensor is in; 0 if it has none."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # tensors that wrap others, fake tensors
        return 0


def _called_by_us() -> bool:
    """Whether a transfer of this package runs the operator, which may touch all ranks' memory."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "pyparallel.parallel_apply":
            return False
        if isinstance(name, str) and name.startswith("pyparallel.") and name != __name__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
