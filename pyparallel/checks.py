"""Checks of the tensors of a collective. All of them run before anything is launched."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyparallel.devices import Device
from pyparallel.forward_ad import refuse_tangents, refuse_transformed
from pyparallel.written import check_autograd, check_separate


def check_rank(operation: str, rank: int, nranks: int) -> None:
    """Raises ValueError unless ``rank`` is one of ``nranks`` ranks."""
    if not 0 <= rank < nranks:
        raise ValueError(f"{operation}: root {rank} is not one of the {nranks} ranks")


def check_count(operation: str, what: str, count: int, nranks: int) -> None:
    """Raises ValueError unless there is one of these things for each rank."""
    if count != nranks:
        raise ValueError(f"{operation}: got {count} {what} for {nranks} ranks")


def check_rows(operation: str, rows: Sequence[Sequence[object]]) -> None:
    """Raises ValueError unless all ranks have the same number of tensors."""
    for rank, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{operation}: rank {rank} has {len(row)} tensors, but rank 0 has {len(rows[0])}"
            )


def check_tensor(operation: str, tensor: Tensor, rank: int, device: Device) -> None:
    """Raises unless a rank's tensor is one, is on its device, and can be moved.

    Raises:
        TypeError: No tensor.
        ValueError: A tensor on a wrong device.
        NotImplementedError: A tensor with a tangent of forward-mode AD, or of another transform.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: rank {rank} has a {type(tensor).__name__}, not a tensor")
    if tensor.device != device.torch_device:
        raise ValueError(
            f"{operation}: expected a tensor of rank {rank} on {device}, but got one on "
            f"{tensor.device}"
        )
    refuse_tangents(operation, (tensor,))
    refuse_transformed(operation, tensor)


def check_not_quantized(operation: str, tensor: Tensor, rank: int) -> None:
    """Raises TypeError for a quantized tensor, whose bytes are not its values."""
    if tensor.is_quantized:
        raise TypeError(
            f"{operation}: rank {rank} has a quantized tensor ({tensor.dtype}), which can only be "
            "broadcast as a whole; pass tensor.dequantize()"
        )


def check_terms(
    operation: str, terms: Sequence[Tensor | None], devices: Sequence[Device]
) -> list[Tensor]:
    """Checks what the ranks want to add up and returns those that are there.

    Raises:
        ValueError: A shape or dtype differs from the first.
    """
    present: list[Tensor] = []
    for rank, (term, device) in enumerate(zip(terms, devices, strict=True)):
        if term is None:
            continue
        check_tensor(operation, term, rank, device)
        check_not_quantized(operation, term, rank)
        present.append(term)
        first = present[0]
        if term.size() != first.size():
            raise ValueError(
                f"input {rank} has invalid size: got {_times(term)}, but expected {_times(first)}"
            )
        if term.dtype != first.dtype:
            raise ValueError(
                f"input {rank} has invalid dtype: got {term.dtype}, but expected {first.dtype}"
            )
    return present


def check_pieces(tensors: Sequence[Tensor], dim: int) -> tuple[int, list[int]]:
    """Checks tensors to be joined along ``dim``; returns ``dim`` >= 0 and the joined size.

    Raises:
        RuntimeError: No tensors, or sizes that do not match in the other dimensions.
        IndexError: ``dim`` is out of range.
    """
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dim() != first.dim():
            raise RuntimeError(
                "Expected all input tensors to have the same number of dimensions, but tensor at "
                f"index {i} has {tensor.dim()} dimensions, (expected {first.dim()})"
            )
    if first.dim() == 0:
        raise RuntimeError("zero-dimensional tensor (at position 0) cannot be concatenated")
    dim = wrap_dim(dim, first.dim())
    expected = list(first.size())
    total = 0
    for i, tensor in enumerate(tensors):
        expected[dim] = tensor.size(dim)
        if list(tensor.size()) != expected:
            raise RuntimeError(
                f"Input tensor at index {i} has invalid shape {list(tensor.size())}, but expected "
                f"{expected}"
            )
        total += tensor.size(dim)
    expected[dim] = total
    return dim, expected


def check_gathered(
    tensors: Sequence[Tensor], dim: int, root: int | None, devices: Sequence[Device]
) -> tuple[int, list[int]]:
    """Checks the arguments of gather; see ``check_pieces``. ``root`` None: the host.

    Raises:
        ValueError: The root is no rank, or there are more tensors than ranks, or one is not on the
            device of its rank.
    """
    if root is not None:
        check_rank("gather", root, len(devices))
    if len(tensors) > len(devices):
        raise ValueError(f"gather: got {len(tensors)} tensors for {len(devices)} ranks")
    for rank, (tensor, device) in enumerate(zip(tensors, devices, strict=False)):
        check_tensor("gather", tensor, rank, device)
        check_not_quantized("gather", tensor, rank)
    return check_pieces(tensors, dim)


def check_chunks(outputs: Sequence[Tensor], source: Tensor, dim: int) -> int:
    """Checks that the outputs can hold the source cut along ``dim``; returns ``dim`` >= 0."""
    if source.dim() == 0:
        raise RuntimeError("split expects at least a 1-dimensional tensor")
    dim = wrap_dim(dim, source.dim())
    total = 0
    for i, output in enumerate(outputs):
        size = list(output.size())
        if len(size) == source.dim():
            total += size[dim]
            size[dim] = source.size(dim)
        if size != list(source.size()):
            raise RuntimeError(
                f"Output tensor at index {i} has incorrect shape: {list(output.size())}. Expected "
                f"same shape except for scatter dim {dim} as the source tensor: "
                f"{list(source.size())}"
            )
    if total != source.size(dim):
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source "
            f"tensor size at dim {dim}. Expected {source.size(dim)}, but got total size {total}"
        )
    return dim


def check_outputs(
    operation: str, outputs: Sequence[Tensor], devices: Sequence[Device], dtype: torch.dtype
) -> None:
    """Raises unless each rank has a contiguous tensor of ``dtype`` of its own on its device."""
    check_count(operation, "output tensors", len(outputs), len(devices))
    for rank, (output, device) in enumerate(zip(outputs, devices, strict=True)):
        check_tensor(operation, output, rank, device)
        check_not_quantized(operation, output, rank)
        check_output(operation, output, rank, dtype)
    check_separate(operation, outputs)


def check_same_size(outputs: Sequence[Tensor], source: Tensor) -> None:
    """Raises RuntimeError unless every output has the size of the source."""
    for i, output in enumerate(outputs):
        if output.size() != source.size():
            raise RuntimeError(
                "Expected all output tensors to have same shape as the source tensor "
                f"{list(source.size())}, but output tensor at index {i} has shape "
                f"{list(output.size())}"
            )


def check_output(operation: str, output: Tensor, index: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless an output can be written as a plain block of ``dtype``.

    RuntimeError where autograd forbids it, see ``check_autograd``.
    """
    if output.dtype != dtype:
        raise ValueError(
            f"{operation}: output tensor at index {index} has dtype {output.dtype}, but the source "
            f"has {dtype}"
        )
    strided = output.layout is torch.strided
    if not strided or not output.is_contiguous():
        layout = f"strides {list(output.stride())}" if strided else f"layout {output.layout}"
        raise ValueError(
            f"{operation}: expected contiguous output tensors, but output tensor at index {index} "
            f"has shape {list(output.size())} and {layout}"
        )
    if output.is_conj() or output.is_neg():
        raise ValueError(
            f"{operation}: output tensor at index {index} is a lazy conjugate or negation"
        )
    check_autograd(operation, output, index)


def wrap_dim(dim: int, dims: int) -> int:
    """Returns ``dim`` counted from the front. Raises IndexError if it is out of range."""
    low = -max(dims, 1)
    if not low <= dim < -low:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{low}, {-low - 1}], "
            f"but got {dim})"
        )
    return dim % max(dims, 1)


def _times(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.size()))
