"""Devices of ranks: GPUs, and virtual devices that are ranks on the CPU.

A rank is not a device: several ranks may share one GPU, and every virtual device is the CPU.
Tensors of virtual devices are ordinary CPU tensors; which rank one belongs to is known by its
position in a list.
"""

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from pyparallel import env

_CURRENT_GPU = frozenset(("cuda", torch.device("cuda")))


@dataclass(frozen=True)
class Device:
    """One GPU (``kind`` "cuda") or one virtual device (``kind`` "cpu").

    Attributes:
        kind: "cuda" or "cpu".
        index: The number of the GPU as CUDA counts, or of the virtual device.
    """

    kind: Literal["cpu", "cuda"]
    index: int

    @functools.cached_property
    def torch_device(self) -> torch.device:
        """Where this device's tensors are. Virtual devices share ``torch.device("cpu")``.

        It has no index there, because ``torch.device("cpu:0") != torch.device("cpu")``.
        """
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


DeviceLike = Device | torch.device | str | int


def virtual_devices(n: int) -> list[str]:
    """Returns the names of ``n`` virtual devices, ``["cpu:0", "cpu:1", ...]``.

    A virtual device is a rank on the CPU with its own copies of everything, as a GPU would have.

    Raises:
        ValueError: ``n`` is negative.
    """
    if n < 0:
        raise ValueError(f"virtual_devices expects a number of devices, but got {n}")
    return [f"cpu:{i}" for i in range(n)]


def resolve_devices(
    device_ids: Iterable[DeviceLike] | None, *, need_index: bool = False
) -> list[Device]:
    """Turns what users write into devices.

    Args:
        device_ids: Ints, strings such as "cuda:0" and "cpu:1", ``torch.device`` objects, or None
            for all devices. With PYPARALLEL_VIRTUAL_DEVICES=n an int is a virtual device and None
            means all n of them; without it an int is a GPU and None means all GPUs, of which there
            may be none. "cpu" without an index, n times, means the virtual devices 0 to n - 1.
            "cuda" without an index is the current GPU.
        need_index: Refuse "cuda" without an index, as ``torch.cuda.comm`` does.

    Raises:
        ValueError: A device that does not exist or is of another type, or GPUs mixed with virtual
            devices.
        RuntimeError: A negative index, or a string that is no device.
    """
    virtual = env.virtual_device_count()
    if device_ids is None:
        kind: Literal["cpu", "cuda"] = "cuda" if virtual is None else "cpu"
        return [Device(kind, i) for i in range(virtual or torch.cuda.device_count())]
    named = tuple(device_ids)
    try:
        if not need_index and not _CURRENT_GPU.isdisjoint(named):
            # Not cached: the current GPU changes.
            current = torch.device("cuda", torch.cuda.current_device())
            named = tuple(current if d in _CURRENT_GPU else d for d in named)
        return list(_resolve(named, virtual))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        raise _not_a_device(named) from None


def parse_device(
    name: object, int_kind: Literal["cpu", "cuda"]
) -> tuple[Literal["cpu", "cuda"], int | None]:
    """Returns kind and index of one device; the index is None where the name has none.

    Raises:
        ValueError: Neither a GPU nor a virtual device.
        RuntimeError: A negative index, or a string that is no device.
    """
    if isinstance(name, Device):
        return name.kind, name.index
    if isinstance(name, str):
        name = torch.device(name)
    if isinstance(name, torch.device):
        if name.type == "cpu":
            return "cpu", name.index
        if name.type == "cuda":
            return "cuda", name.index
        raise ValueError(f"Expected a GPU or a virtual device, but got: {name}")
    try:
        index = operator.index(name)  # type: ignore[arg-type]
    except TypeError:
        raise _not_a_device(name) from None
    if index < 0:
        raise RuntimeError(f"Expected non-negative device index, but got {index}")
    return int_kind, index


def check_exists(device: Device, virtual: int | None) -> None:
    """Raises ValueError unless there is such a GPU, or one of ``virtual`` virtual devices."""
    if device.kind == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"{device} is not there: this machine has {torch.cuda.device_count()} GPUs, and "
                f"PYPARALLEL_VIRTUAL_DEVICES is {virtual or 'not set'}"
            )
    elif virtual is not None and device.index >= virtual:
        raise ValueError(f"{device} is not there: there are {virtual} virtual devices")


@functools.lru_cache(maxsize=256)
def _resolve(named: tuple[DeviceLike, ...], virtual: int | None) -> tuple[Device, ...]:
    parsed = [parse_device(d, "cuda" if virtual is None else "cpu") for d in named]
    if parsed and all(kind == "cpu" and index is None for kind, index in parsed):
        return tuple(Device("cpu", i) for i in range(len(parsed)))
    devices = []
    for name, (kind, index) in zip(named, parsed, strict=True):
        if index is None:
            raise _not_a_device(name)
        device = Device(kind, index)
        # "cpu:7" is a rank of this list and nothing more; an int counts what the variable promised.
        if kind == "cuda" or not isinstance(name, (str, torch.device, Device)):
            check_exists(device, virtual)
        devices.append(device)
    if len({d.kind for d in devices}) > 1:
        raise ValueError(
            f"expected either GPUs or virtual devices, but got both: {', '.join(map(str, devices))}"
        )
    return tuple(devices)


def _not_a_device(name: object) -> ValueError:
    return ValueError(
        f"Expected a torch.device with a specified index or an integer, but got:{name}"
    )
