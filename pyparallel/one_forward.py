"""``data_parallel``: the wrapper as a function, for one call."""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pyparallel.chunk_sizes import Split
from pyparallel.data_parallel import DataParallel
from pyparallel.devices import DeviceLike
from pyparallel.dispatch import Dispatch, Dispatcher
from pyparallel.replicate import check_not_modified, replicate

_dispatchers: WeakKeyDictionary[nn.Module, dict[str, Dispatcher]] = WeakKeyDictionary()


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Iterable[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    split: Split = "chunk",
    dispatch: Dispatch = "auto",
) -> Any:
    """Calls a module on several devices, each with its share of the batch; see ``DataParallel``.

    Args:
        module: Its parameters and buffers must be on ``device_ids[0]``. It is never moved.
        inputs: A tuple of positional arguments, or the only one; None for none.
        device_ids: As for ``DataParallel``.
        output_device: As for ``DataParallel``.
        dim: As for ``DataParallel``.
        module_kwargs: Keyword arguments.
        split: As for ``DataParallel``.
        dispatch: As for ``DataParallel``. What "auto" measures is kept for each module.

    Returns:
        The joined output on ``output_device``.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    wrapper: _OneForward = _OneForward.__new__(_OneForward)
    nn.Module.__init__(wrapper)
    wrapper._configure(module, device_ids, output_device, dim, split)
    dispatchers = _dispatchers.setdefault(module, {})
    wrapper._dispatcher = dispatchers.setdefault(dispatch, Dispatcher(dispatch))
    return wrapper.forward(*inputs, **(module_kwargs or {}))


class _OneForward(DataParallel[nn.Module]):
    """A wrapper for one call, for which nothing needs to persist."""

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Returns new copies."""
        self._check_module()
        return replicate(module, self._devices(device_ids), not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Runs the copies."""
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        check_not_modified(replicas[0])
        return outputs
