"""Splitting inputs between ranks and joining outputs, through nested containers."""

import copy
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pyparallel import functions
from pyparallel.chunk_sizes import Split, chunk_sizes
from pyparallel.communicator import get_communicator
from pyparallel.devices import Device
from pyparallel.forward_ad import refuse_tangents


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    devices: Sequence[Device],
    dim: int = 0,
    split: Split = "chunk",
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Splits every tensor in the arguments along ``dim``, one chunk for each rank.

    By default chunks have the sizes of ``torch.chunk``, so a batch of 5 on 4 devices makes 3
    chunks, and only 3 ranks are used; see ``chunk_sizes``. The chunk of the rank that holds the
    tensor is a view of it. Tensors without dimensions are copied to every used rank. Tuples, named
    tuples, lists, dicts and UserDicts are rebuilt around the chunks; every other object, and an
    empty container, is shared by all ranks.

    Args:
        inputs: Positional arguments.
        kwargs: Keyword arguments.
        devices: The device of each rank.
        dim: Dimension to split; negative ones count from the end of each tensor.
        split: Rule for the sizes of chunks.

    Returns:
        Positional and keyword arguments of each used rank; both empty if there are no arguments at
        all.

    Raises:
        ValueError: Tensors would be split into different numbers of chunks.
        IndexError: A tensor lacks dimension ``dim``.
        TypeError: A sparse or nested tensor or a PackedSequence.
        NotImplementedError: A tensor with a tangent of forward-mode AD.
    """
    if not inputs and not kwargs:
        return (), ()
    count = _chunk_count((inputs, kwargs), len(devices), dim, split)
    used = devices[:count]

    def place(tensor: Tensor) -> Sequence[Tensor]:
        return _split_tensor(tensor, devices, dim, split) if tensor.dim() else _copies(tensor, used)

    args = tuple(_split(inputs, count, place))
    return args, tuple(_split(kwargs, count, place)) if kwargs else tuple({} for _ in used)


def gather(
    outputs: Sequence[Any], devices: Sequence[Device], target: Device | None, dim: int = 0
) -> Any:
    """Joins the outputs of the ranks.

    Tensors are concatenated along ``dim``; those without dimensions become a vector with one entry
    a rank, and so do Python numbers. The result has the dtype to which all promote. Tuples, named
    tuples, lists, deques, dicts, UserDicts and dataclasses are joined entry by entry. None stays
    None. Of any other object, such as a string, the result is the list of what each rank returned.

    Args:
        outputs: One output a rank, all of the same structure.
        devices: The device of each rank.
        target: Where tensors go; None is host memory.
        dim: Dimension along which tensors are joined.

    Raises:
        RuntimeError: Tensors differ in another size than that of ``dim``.
        IndexError: Tensors lack dimension ``dim``.
        TypeError: Ranks returned different kinds of things.
        ValueError: Dicts or sequences of different length.
        KeyError: Dicts with different keys.
        NotImplementedError: A tensor with a tangent of forward-mode AD.
    """
    return _gather(outputs, devices, target, dim, "output")


def _gather(
    outputs: Sequence[Any], devices: Sequence[Device], target: Device | None, dim: int, path: str
) -> Any:
    """``gather`` of what the ranks have at ``path``, written as in Python."""
    first = outputs[0]
    kind = _kind(first)
    _check_alike(outputs, kind, path)

    def join(column: Sequence[Any], step: str) -> Any:
        return _gather(column, devices, target, dim, path + step)

    if kind == "tensor":
        try:
            return _join_tensors(outputs, devices, target, dim)
        except (RuntimeError, IndexError) as error:
            # Subclasses, out of memory for instance, say nothing about the outputs.
            if type(error) not in (RuntimeError, IndexError):
                raise
            raise type(error)(f"{error}{_at(path)}") from error
    if kind == "none":
        return None
    if kind == "number":
        return torch.tensor(outputs, device=target.torch_device if target else "cpu")
    if kind == "mapping":
        columns = [[output[key] for output in outputs] for key in first]
        steps = [f"[{key!r}]" for key in first]
        return _rebuild(first, list(map(join, columns, steps)))
    if kind == "dataclass":
        result = copy.copy(first)
        for field in fields(first):
            # Not setattr, which a frozen dataclass refuses.
            column = [getattr(output, field.name) for output in outputs]
            object.__setattr__(result, field.name, join(column, f".{field.name}"))
        return result
    if kind == "sequence":
        columns = list(map(list, zip(*outputs, strict=True)))
        return _rebuild(first, [join(column, f"[{i}]") for i, column in enumerate(columns)])
    return list(outputs)


def _check_alike(outputs: Sequence[Any], kind: str, path: str) -> None:
    """Raises what ``gather`` promises unless all ranks have the same structure at ``path``."""
    first = outputs[0]
    for rank, output in enumerate(outputs):
        if _kind(output) != kind or (kind == "dataclass" and type(output) is not type(first)):
            raise TypeError(
                f"gather: replica 0 returned {_name(first)}, "
                f"but replica {rank} returned {_name(output)}{_at(path)}"
            )
        if kind == "sequence" and len(output) != len(first):
            raise ValueError(
                f"gather: replica 0 returned a {_name(first)} of length {len(first)}, but replica "
                f"{rank} returned one of length {len(output)}{_at(path)}"
            )
        if kind == "mapping" and output.keys() != first.keys():
            missing = [key for key in first if key not in output]
            added = [key for key in output if key not in first]
            text = (
                f"gather: replica {rank} lacks the keys {missing} of replica 0, and adds {added}"
                f"{_at(path)}"
            )
            if len(output) != len(first):
                raise ValueError(f"All dicts must have the same number of keys. {text}")
            raise KeyError(text)


def _at(path: str) -> str:
    return f" (at {path})"


def _chunk_count(obj: Any, nranks: int, dim: int, split: Split) -> int:
    sizes = [tensor.size(dim) for tensor in _tensors(obj) if tensor.dim()]
    counts = [len(chunk_sizes(size, nranks, split)) for size in sizes]
    if len(set(counts)) > 1:
        raise ValueError(
            f"scatter: the inputs have sizes {sizes} along dimension {dim}, which make different "
            f"numbers of chunks on {nranks} devices: {counts}; "
            "every tensor needs the batch dimension there"
        )
    return counts[0] if counts else nranks


def _tensors(obj: Any) -> Iterator[Tensor]:
    if isinstance(obj, Tensor):
        if obj.layout is not torch.strided or obj.is_nested:
            raise TypeError(
                f"scatter: a tensor of layout {obj.layout} and shape {list(obj.shape)} "
                "cannot be split"
            )
        refuse_tangents("scatter", (obj,))
        yield obj
    else:
        for entry in _entries(obj) or ():
            yield from _tensors(entry)


def _split(obj: Any, count: int, place: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Any]:
    if isinstance(obj, Tensor):
        return place(obj)
    entries = _entries(obj)
    if not entries:
        return [obj] * count
    columns = [_split(entry, count, place) for entry in entries]
    return [_rebuild(obj, [column[rank] for column in columns]) for rank in range(count)]


def _entries(obj: Any) -> list[Any] | None:
    """What a container holds; None for any other object."""
    if isinstance(obj, PackedSequence):
        raise TypeError(
            "a PackedSequence has no batch dimension to split or join: pass the padded tensor "
            "and the lengths, pack them inside forward, and return padded tensors"
        )
    if isinstance(obj, (tuple, list)) and not isinstance(obj, torch.Size):
        return list(obj)
    if isinstance(obj, (dict, UserDict)):
        return list(obj.values())
    return None


def _rebuild(obj: Any, entries: list[Any]) -> Any:
    """A container like ``obj`` around other entries, in the same order."""
    if type(obj) in (list, deque):
        return type(obj)(entries)
    if isinstance(obj, tuple):
        return type(obj)._make(entries) if hasattr(obj, "_make") else type(obj)(entries)
    # Subclasses have constructors of their own kind, defaultdict and Counter for instance.
    result = copy.copy(obj)
    if isinstance(obj, list):
        result[:] = entries
    else:
        for key, entry in zip(obj, entries, strict=True):
            result[key] = entry
    return result


def _split_tensor(
    tensor: Tensor, devices: Sequence[Device], dim: int, split: Split
) -> Sequence[Tensor]:
    sizes = chunk_sizes(tensor.size(dim), len(devices), split)
    root = _rank_on(tensor.device, devices[: len(sizes)])
    if root is None and tensor.device.type != "cpu":
        # A GPU that is none of the ranks'.
        pieces = tensor.split_with_sizes(sizes, dim)
        return [p.to(d.torch_device) for p, d in zip(pieces, devices, strict=False)]
    communicator = get_communicator(devices)
    if tensor.requires_grad and torch.is_grad_enabled():
        return functions.scatter(communicator, root, sizes, dim, tensor)
    # detach, because autograd does not let forward write to a view that was made while it was off.
    return [p.detach() for p in communicator.scatter(tensor, sizes, dim=dim, root=root)]


def _copies(tensor: Tensor, devices: Sequence[Device]) -> Sequence[Tensor]:
    """One copy of a tensor without dimensions for each rank."""
    if tensor.device != devices[0].torch_device:
        return [tensor.to(device.torch_device) for device in devices]
    communicator = get_communicator(devices)
    if tensor.requires_grad and torch.is_grad_enabled():
        return [row[0] for row in functions.broadcast(communicator, [tensor])]
    return [row[0] for row in communicator.broadcast([tensor])]


def _join_tensors(
    tensors: Sequence[Tensor], devices: Sequence[Device], target: Device | None, dim: int
) -> Tensor:
    refuse_tangents("gather", tensors)
    if all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will "
            "instead unsqueeze and return a vector.",
            stacklevel=2,
        )
        tensors, dim = [tensor.reshape(1) for tensor in tensors], 0
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    tensors = [tensor.to(dtype) for tensor in tensors]
    ranks = devices[: len(tensors)]
    root = None if target is None else _rank_of(target, ranks)
    at_home = all(t.device == d.torch_device for t, d in zip(tensors, ranks, strict=True))
    strided = all(t.layout is torch.strided and not t.is_nested for t in tensors)
    if at_home and strided and (target is None or root is not None):
        return functions.gather(get_communicator(devices), root, dim, tensors)
    # The replica left its device, or the target is no rank's.
    place = torch.device("cpu") if target is None else target.torch_device
    return torch.cat([tensor.to(place) for tensor in tensors], dim)


def _rank_on(device: torch.device, devices: Sequence[Device]) -> int | None:
    return next((rank for rank, d in enumerate(devices) if d.torch_device == device), None)


def _rank_of(device: Device, devices: Sequence[Device]) -> int | None:
    return next((rank for rank, d in enumerate(devices) if d == device), None)


def _kind(obj: Any) -> str:
    """How ``gather`` treats an output."""
    if isinstance(obj, Tensor):
        return "tensor"
    if obj is None:
        return "none"
    if isinstance(obj, (bool, int, float, complex)) and not isinstance(obj, Enum):
        return "number"
    if isinstance(obj, (dict, UserDict)):
        return "mapping"
    if is_dataclass(obj) and not isinstance(obj, type):
        return "dataclass"
    return "sequence" if isinstance(obj, deque) or _entries(obj) is not None else "object"


def _name(obj: Any) -> str:
    return "None" if obj is None else type(obj).__name__
