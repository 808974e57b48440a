"""Devices of ranks: GPUs, and virtual devices that are ranks on the CPU.

A rank is not a device: several ranks may share one GPU, and every virtual device is the CPU.
Tensors of virtual devices are ordinary CPU tensors; which rank one belongs to is known by its
position in a list.
"""

import functools
import operator
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pyparallel import env

# torch.device keeps an index in eight bits: there "cpu:128" is -128, and "cpu:256" is 0.
_MAX_INDEX = 127
_NAME = re.compile(r"(cpu|cuda):(\d+)")

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
        ValueError: ``n`` is negative or more than 16, the largest number of ranks.
        TypeError: ``n`` is not an int, such as a string of the environment.
    """
    if not hasattr(n, "__index__"):
        raise TypeError(f"virtual_devices expects a number of devices, but got {n!r}")
    if n < 0:
        raise ValueError(f"virtual_devices expects a number of devices, but got {n}")
    check_rank_count(n)
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
        ValueError: A device that does not exist or is of another type, GPUs mixed with virtual
            devices, or more than 16 devices.
        RuntimeError: A negative index, or a string that is no device.
        TypeError: One device instead of a list.
    """
    virtual = env.virtual_device_count()
    if device_ids is None:
        kind: Literal["cpu", "cuda"] = "cuda" if virtual is None else "cpu"
        count = virtual or torch.cuda.device_count()
        check_rank_count(count)
        return [Device(kind, i) for i in range(count)]
    named = device_list(device_ids)
    check_rank_count(len(named))
    try:
        if not need_index and not _CURRENT_GPU.isdisjoint(named):
            # Not cached: the current GPU changes.
            current = torch.device("cuda", torch.cuda.current_device())
            named = tuple(current if d in _CURRENT_GPU else d for d in named)
        return list(_resolve(named, virtual))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        strange = next((d for d in named if type(d).__hash__ is None), named)
        raise _not_a_device(strange) from None


def device_list(device_ids: Iterable[DeviceLike]) -> tuple[DeviceLike, ...]:
    """Returns the devices that a user listed. Raises TypeError for one device without a list."""
    if isinstance(device_ids, str) or not isinstance(device_ids, Iterable):
        raise TypeError(
            f"expected a list of devices, but got {device_ids!r}; write [{device_ids!r}]"
        )
    return tuple(device_ids)


def check_rank_count(count: int) -> None:
    """Raises ValueError for more ranks than a communicator can have."""
    if count > env.MAX_RANKS:
        raise ValueError(
            f"pyparallel runs on at most {env.MAX_RANKS} ranks, but got {count} devices"
        )


def parse_device(
    name: object, int_kind: Literal["cpu", "cuda"]
) -> tuple[Literal["cpu", "cuda"], int | None]:
    """Returns kind and index of one device; the index is None where the name has none.

    Raises:
        ValueError: Neither a GPU nor a virtual device.
        RuntimeError: A negative index, or a string that is no device.
    """
    kind: Literal["cpu", "cuda"]
    index: int | None
    if isinstance(name, Device):
        kind, index = name.kind, name.index
    elif isinstance(name, (str, torch.device)):
        kind, index = _parse_name(name)
    else:
        try:
            kind, index = int_kind, operator.index(name)  # type: ignore[arg-type]
        except TypeError:
            raise _not_a_device(name) from None
    if index is not None and index < 0:
        raise RuntimeError(f"Expected non-negative device index, but got {index}")
    return kind, index


def _parse_name(name: str | torch.device) -> tuple[Literal["cpu", "cuda"], int | None]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match and int(match[2]) > _MAX_INDEX:
        raise ValueError(f"{name} is no device: indices go from 0 to {_MAX_INDEX}")
    device = torch.device(name)
    if device.type == "cpu":
        return "cpu", device.index
    if device.type == "cuda":
        return "cuda", device.index
    raise ValueError(f"Expected a GPU or a virtual device, but got: {name}")


def host_if_minus_1(destination: Any) -> Any:
    """Returns "cpu" for -1, which torch deprecates with this warning, else ``destination``."""
    if not isinstance(destination, int) or destination != -1:
        return destination
    warnings.warn(
        "Using -1 to represent CPU tensor is deprecated. Please use a device object or string "
        'instead, e.g., "cpu".',
        FutureWarning,
        stacklevel=3,
    )
    return "cpu"


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
