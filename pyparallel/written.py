"""Tensors of the caller that a collective writes to: what autograd and their memory must allow."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pyparallel.layout import is_dense

_CLONE = "Please clone() the tensor before performing the operation."


def mark_written(outputs: Sequence[Tensor]) -> None:
    """Bumps version counters. The core wrote behind torch's back, and autograd must notice it."""
    increment_version(outputs)


def check_autograd(operation: str, output: Tensor, index: int) -> None:
    """Refuses a write that would leave a wrong graph, as torch's in-place operations do.

    Raises:
        RuntimeError: Gradients are on and the output requires one, or the output was made in
            inference mode and this is another mode.
    """
    where = f"{operation}: output tensor at index {index}"
    if output.requires_grad and torch.is_grad_enabled():
        base = output._base
        if output.is_leaf:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation. "
                f"({where})"
            )
        if base is not None and base.is_leaf:
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place "
                f"operation. ({where})"
            )
        raise RuntimeError(
            f"{operation}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad. "
            f"(output tensor at index {index})"
        )
    if output.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"Inplace update to inference tensor outside InferenceMode is not allowed. ({where})"
        )


def check_separate(operation: str, outputs: Sequence[Tensor]) -> None:
    """Raises RuntimeError if two contiguous outputs share memory."""
    spans = sorted((*_span(output), k) for k, output in enumerate(outputs) if output.numel())
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            first, second = sorted((first, second))
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to "
                f"a single memory location. {_CLONE} ({operation}: output tensors at indices "
                f"{first} and {second})"
            )


def check_overlap(
    operation: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    in_place: Mapping[int, tuple[int, Tensor]],
) -> None:
    """Raises RuntimeError if an output shares memory with an input that is read as it lies.

    Inputs that are not dense are copied before anything is written.

    Args:
        operation: For the message.
        inputs: What is read.
        outputs: What is written, contiguous.
        in_place: Which output may be what: its index -> (index of the input, that input or the part
            of it that belongs there).
    """
    read = [
        (*_span(tensor), i)
        for i, tensor in enumerate(inputs)
        if tensor.layout is torch.strided and tensor.numel() and is_dense(tensor)
    ]
    for k, output in enumerate(outputs):
        start, end = _span(output)
        for first, last, i in read:
            if start >= last or first >= end:
                continue
            allowed, part = in_place.get(k, (None, output))
            if allowed == i and _same_memory(part, output):
                continue
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to "
                f"tensor refer to a single memory location. {_CLONE} ({operation}: input tensor "
                f"at index {i} and output tensor at index {k})"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.size() == b.size() and a.is_contiguous()
