"""Which ranks a call of ``pyparallel.comm`` is about: its tensors' places and its arguments tell.

CPU tensors are virtual devices: the tensor at position i belongs to rank i.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from pyparallel import env
from pyparallel.checks import check_count
from pyparallel.devices import Device, check_exists, parse_device


def devices_of(tensors: Sequence[Tensor]) -> list[Device]:
    """Returns the device of each rank, if the tensors are all on GPUs or all on the CPU.

    Raises:
        ValueError: A tensor is on another device, or a CPU tensor is among those of GPUs.
    """
    if all(tensor.is_cpu for tensor in tensors):
        return list(_virtual_ranks(len(tensors)))
    for i, tensor in enumerate(tensors):
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensor at index {i} is on {tensor.device}, not on a GPU or the CPU")
    stray = _stray_cpu_index(tensors)
    if stray is not None:
        raise ValueError(f"expected all tensors on GPUs, but tensor at index {stray} is on CPU")
    return [Device("cuda", tensor.device.index) for tensor in tensors]


@functools.cache
def _virtual_ranks(n: int) -> tuple[Device, ...]:
    return tuple(Device("cpu", i) for i in range(n))


def _stray_cpu_index(tensors: Sequence[Tensor]) -> int | None:
    """Returns the first position of a CPU tensor among tensors of GPUs."""
    on_cpu = [i for i, tensor in enumerate(tensors) if tensor.is_cpu]
    return on_cpu[0] if on_cpu and len(on_cpu) < len(tensors) else None


def destination_device(destination: object, kind: Literal["cpu", "cuda"]) -> Device | None:
    """Returns where a result shall go; None for host memory of GPUs.

    An int counts devices of the kind of the inputs. None is the current GPU or virtual device 0.
    """
    if destination is None:
        destination = torch.device(kind)
    named, index = parse_device(destination, kind)
    if named == "cpu":
        return Device("cpu", index or 0) if kind == "cpu" else None
    return Device("cuda", torch.cuda.current_device() if index is None else index)


def reduce_ranks(tensors: Sequence[Tensor], destination: object) -> tuple[list[Device], int]:
    """Returns the ranks of a sum of these tensors, and which one holds the destination's."""
    stray = _stray_cpu_index(tensors)
    if stray is not None:
        raise AssertionError(
            f"reduce_add expects all inputs to be on GPUs, but input {stray} is on CPU"
        )
    ranks = devices_of(tensors)
    target = destination_device(destination, ranks[0].kind)
    if target is None:
        raise ValueError(f"Expected a non cpu device, but got: {destination}")
    if target not in ranks:
        where = "the same GPU" if target.kind == ranks[0].kind == "cuda" else "the same device"
        raise RuntimeError(
            f"reduce_add expects destination to be on {where} with one of the tensors, but got "
            f"{target}; they are on {', '.join(map(str, ranks))}"
        )
    return ranks, ranks.index(target)


def gather_ranks(tensors: Sequence[Tensor], destination: object) -> tuple[list[Device], int | None]:
    """Returns the ranks that join these tensors, and the root; None for host memory of GPUs.

    On GPUs a destination that holds none of the tensors is a rank of its own, the last one.
    """
    stray = _stray_cpu_index(tensors)
    if stray is None:
        ranks = devices_of(tensors)
        target = destination_device(destination, ranks[0].kind)
        if target is None:
            return ranks, None
        if target.kind == ranks[0].kind == "cpu":
            check_exists(target, max(len(ranks), env.virtual_device_count() or 0))
            return ranks, min(target.index, len(ranks) - 1)  # all of them share the memory
        if target.kind == ranks[0].kind:
            check_exists(target, None)
            ranks = ranks if target in ranks else [*ranks, target]
            return ranks, ranks.index(target)
    raise RuntimeError(
        "Expected all input tensors to be CUDA tensors, but tensor at index "
        f"{stray or 0} has device cpu"
    )


def with_source(source: Tensor, devices: Sequence[Device]) -> tuple[list[Device], int, bool]:
    """Returns the ranks of a call, its root, which has the source, and whether that was added.

    On virtual devices that is the first rank. On GPUs it is the first
    rank of the source's GPU; where there is none a rank is added in front.
    """
    ranks = list(devices)
    if not source.is_cuda or ranks[0].kind == "cpu":
        return ranks, 0, False
    own = Device("cuda", source.device.index)
    if own in ranks:
        return ranks, ranks.index(own), False
    return [own, *ranks], 0, True


@contextlib.contextmanager
def on_streams(
    streams: Sequence[torch.cuda.Stream | None] | None, devices: Sequence[Device], source: Tensor
) -> Iterator[None]:
    """Makes these the current streams of their devices; the source's device keeps its own.

    Raises:
        RuntimeError: A stream belongs to another device than the rank at its position.
        ValueError: Ranks of one GPU have different streams, or the number of streams is not that of
            the ranks.
    """
    if streams is not None:
        check_count("scatter", "streams", len(streams), len(devices))
    chosen: dict[Device, torch.cuda.Stream] = {}
    for i, (stream, device) in enumerate(zip(streams or (), devices, strict=False)):
        if stream is None or device.torch_device == source.device:
            continue
        if stream.device != device.torch_device:
            raise RuntimeError(
                f"Expected the device associated with the stream at index {i} (was "
                f"{stream.device.index}) to match the device supplied at that index (expected "
                f"{device.index})"
            )
        if chosen.setdefault(device, stream) != stream:
            raise ValueError(f"got two streams for {device}, the second one at index {i}")
    with contextlib.ExitStack() as stack:
        for stream in chosen.values():
            stack.enter_context(torch.cuda.stream(stream))
        yield
