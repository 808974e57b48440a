"""Splitting inputs between ranks and joining outputs, through nested containers."""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pyparallel import functions
from pyparallel.checks import check_pieces
from pyparallel.chunk_sizes import Split, chunk_sizes
from pyparallel.communicator import get_communicator
from pyparallel.containers import entries_of, rebuild
from pyparallel.devices import Device
from pyparallel.equal_rows import has_equal_rows, one_row_each
from pyparallel.forward_ad import refuse_tangents, refuse_transforms


class ScalarGatherWarning(UserWarning):
    """Replicas returned tensors without dimensions, such as a loss, and the result is a vector.

    In torch's words, as a class that can be filtered:
    ``warnings.simplefilter("ignore", pyparallel.ScalarGatherWarning)``. There is none for a tensor
    with one element, as ``loss.reshape(1)``.
    """


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
    tensor is a view of it. Tensors without dimensions are copied to every used rank. One rank gets
    everything whole, and what is on its device already is the caller's own. Tuples, lists,
    mappings and classes registered with ``torch.utils._pytree`` are rebuilt around the chunks;
    every other object, and an empty container, is shared by all ranks. Chunks of a subclass of
    Tensor are what the operations of torch make of it.

    Tensors that make different numbers of chunks are refused, except those with at most as many
    rows as there are ranks, all equal, as of a number that the caller repeated for each device, or
    of a mask with one row: every used rank gets one row of them. The others decide how many ranks
    are used; if there are none, the first tensor does.

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
        ValueError: Tensors whose rows differ would make different numbers of chunks.
        IndexError: A tensor lacks dimension ``dim``.
        TypeError: A mapping of tensors that cannot be rebuilt; on several ranks a sparse or nested
            tensor or a PackedSequence.
        NotImplementedError: On several ranks, a tensor with a tangent of forward-mode AD, or a
            transform of ``torch.func`` that is going on.
    """
    if len(devices) > 1:
        refuse_transforms()
    if not inputs and not kwargs:
        return (), ()
    count = 1 if len(devices) == 1 else _chunk_count((inputs, kwargs), len(devices), dim, split)
    used = devices[:count]

    def place(tensor: Any) -> Sequence[Any]:
        if len(devices) == 1:
            return [tensor.to(devices[0].torch_device, non_blocking=True)]
        if not tensor.dim():
            return _copies(tensor, used)
        sizes = chunk_sizes(tensor.size(dim), len(devices), split)
        if len(sizes) != count:
            tensor, sizes = one_row_each(tensor, count, dim)
        return _split_tensor(tensor, sizes, devices, dim)

    args = tuple(_split(inputs, count, place))
    return args, tuple(_split(kwargs, count, place)) if kwargs else tuple({} for _ in used)


def gather(
    outputs: Sequence[Any], devices: Sequence[Device], target: Device | None, dim: int = 0
) -> Any:
    """Joins the outputs of the ranks.

    Tensors are concatenated along ``dim``; those without dimensions become a vector with one entry
    a rank, and so do Python numbers. The result has the dtype to which all promote. Tuples, lists,
    deques, mappings, dataclasses and classes registered with ``torch.utils._pytree`` are joined
    entry by entry. None stays None. Of any other object, such as a string, the result is the list
    of what each rank returned.

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
        return rebuild(first, list(map(join, columns, steps)))
    if kind == "dataclass":
        result = copy.copy(first)
        for field in fields(first):
            # Not setattr, which a frozen dataclass refuses.
            column = [getattr(output, field.name) for output in outputs]
            object.__setattr__(result, field.name, join(column, f".{field.name}"))
        return result
    if kind in ("sequence", "node"):
        columns = list(map(list, zip(*map(_items, outputs), strict=True)))
        return rebuild(first, [join(column, f"[{i}]") for i, column in enumerate(columns)])
    return list(outputs)


def _check_alike(outputs: Sequence[Any], kind: str, path: str) -> None:
    """Raises what ``gather`` promises unless all ranks have the same structure at ``path``."""
    first = outputs[0]
    for rank, output in enumerate(outputs):
        same_type = type(output) is type(first) or kind not in ("dataclass", "node")
        if _kind(output) != kind or not same_type:
            raise TypeError(
                f"gather: replica 0 returned {_name(first)}, "
                f"but replica {rank} returned {_name(output)}{_at(path)}"
            )
        if kind in ("sequence", "node") and len(_items(output)) != len(_items(first)):
            raise ValueError(
                f"gather: replica 0 returned a {_name(first)} of length {len(_items(first))}, but "
                f"replica {rank} returned one of length {len(_items(output))}{_at(path)}"
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
    everything = list(_tensors(obj))
    for tensor in everything:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise TypeError(
                f"scatter: a tensor of layout {tensor.layout} and shape {list(tensor.shape)} "
                "cannot be split"
            )
    refuse_tangents("scatter", everything)
    tensors = [tensor for tensor in everything if tensor.dim()]
    counts = [len(chunk_sizes(tensor.size(dim), nranks, split)) for tensor in tensors]
    if len(set(counts)) <= 1:
        return counts[0] if counts else nranks
    # More rows than ranks are a batch, whatever is in it: a blank one must not go by other rules.
    differing = [t.size(dim) > nranks or not has_equal_rows(t, dim) for t in tensors]
    deciding = {count for count, differs in zip(counts, differing, strict=True) if differs}
    if len(deciding) > 1:
        raise ValueError(
            f"scatter: the inputs have sizes {[tensor.size(dim) for tensor in tensors]} along "
            f"dimension {dim}, which make different numbers of chunks on {nranks} devices: "
            f"{counts}; every tensor needs the batch dimension there, or at most {nranks} equal "
            "rows, of which each device gets one"
        )
    return deciding.pop() if deciding else counts[0]


def _tensors(obj: Any) -> Iterator[Tensor]:
    if isinstance(obj, Tensor):
        yield obj
    else:
        for entry in entries_of(obj) or ():
            yield from _tensors(entry)


def _split(obj: Any, count: int, place: Callable[[Any], Sequence[Any]]) -> Sequence[Any]:
    if isinstance(obj, (Tensor, PackedSequence)):
        return place(obj)
    entries = entries_of(obj)
    if not entries:
        return [obj] * count
    if not isinstance(obj, (tuple, list, dict)) and not any(True for _ in _tensors(obj)):
        return [obj] * count  # a configuration, for instance, whose class need not be rebuilt
    columns = [_split(entry, count, place) for entry in entries]
    return [rebuild(obj, [column[rank] for column in columns]) for rank in range(count)]


def _split_tensor(
    tensor: Tensor, sizes: Sequence[int], devices: Sequence[Device], dim: int
) -> Sequence[Tensor]:
    root = _rank_on(tensor.device, devices[: len(sizes)])
    if not _is_plain(tensor) or (root is None and tensor.device.type != "cpu"):
        # Its class says what operations make of it; or it is on a GPU that is none of the ranks'.
        return _moved(tensor.split_with_sizes(sizes, dim), devices, root)
    communicator = get_communicator(devices)
    if tensor.requires_grad and torch.is_grad_enabled():
        return functions.scatter(communicator, root, sizes, dim, tensor)
    return _unrecorded(communicator.scatter(tensor, sizes, dim=dim, root=root), tensor)


def _copies(tensor: Tensor, devices: Sequence[Device]) -> Sequence[Tensor]:
    """One copy of a tensor without dimensions for each rank."""
    if not _is_plain(tensor) or tensor.device != devices[0].torch_device:
        return _moved([tensor] * len(devices), devices, _rank_on(tensor.device, devices))
    communicator = get_communicator(devices)
    if tensor.requires_grad and torch.is_grad_enabled():
        # clone, because rank 0 gets the memory of what is broadcast, and may write to it.
        return [row[0] for row in functions.broadcast(communicator, [tensor.clone()])]
    return _unrecorded([row[0] for row in communicator.broadcast([tensor])], tensor)


def _moved(
    pieces: Sequence[Tensor], devices: Sequence[Device], root: int | None
) -> Sequence[Tensor]:
    """Gives each rank a piece of its own by torch's operations; the root's stays where it is."""
    moved = [
        piece if rank == root else piece.to(device.torch_device, copy=True)
        for rank, (piece, device) in enumerate(zip(pieces, devices, strict=False))
    ]
    recorded = torch.is_grad_enabled() and pieces[0].requires_grad
    return moved if recorded else _unrecorded(moved, pieces[0])


def _unrecorded(pieces: Sequence[Tensor], tensor: Tensor) -> Sequence[Tensor]:
    """Returns pieces of a tensor as inputs of a forward whose graph begins there, if any."""
    # detach, because autograd does not let forward write to a view that was made while it was off.
    detached = [piece.detach() for piece in pieces]
    if tensor.requires_grad and not torch.is_inference_mode_enabled():
        for piece in detached:
            piece.requires_grad_()  # forward may turn gradients on for itself
    return detached


def _join_tensors(
    tensors: Sequence[Tensor], devices: Sequence[Device], target: Device | None, dim: int
) -> Tensor:
    refuse_tangents("gather", tensors)
    if all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will "
            "instead unsqueeze and return a vector.",
            ScalarGatherWarning,
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
    plain = all(_is_plain(t) and t.layout is torch.strided and not t.is_nested for t in tensors)
    if at_home and plain and (target is None or root is not None):
        return functions.gather(get_communicator(devices), root, dim, tensors)
    # Joined as their class does it, or the replica left its device, or the target is no rank's.
    if not any(tensor.is_nested for tensor in tensors):
        check_pieces(tensors, dim)
    place = torch.device("cpu") if target is None else target.torch_device
    return torch.cat([tensor.to(place) for tensor in tensors], dim)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its class does nothing of its own in operations."""
    return type(tensor) is Tensor or isinstance(tensor, nn.Parameter)


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
    if type(obj) in (tuple, list):
        return "sequence"
    if isinstance(obj, (dict, Mapping)):  # the former answers faster
        return "mapping"
    if is_dataclass(obj) and not isinstance(obj, type):
        return "dataclass"
    if entries_of(obj) is None and not isinstance(obj, deque):
        return "object"
    return "sequence" if isinstance(obj, (tuple, list, deque)) else "node"


def _items(obj: Any) -> list[Any]:
    """The entries of an output of kind "sequence" or "node"."""
    return list(obj) if isinstance(obj, deque) else entries_of(obj) or []


def _name(obj: Any) -> str:
    return "None" if obj is None else type(obj).__name__
