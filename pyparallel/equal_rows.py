"""Inputs whose rows are all equal: one value for every device, not a batch.

A caller that knows the number of devices repeats a number for each of them, as the Trainer of
Hugging Face does with ``num_items_in_batch``. The last batch of an epoch may need fewer devices.
"""

import torch
from torch import Tensor


def has_equal_rows(tensor: Tensor, dim: int) -> bool:
    """Whether all slices along ``dim`` are the same, bit by bit; waits for a GPU's answer."""
    if tensor.size(dim) <= 1 or not tensor.numel():
        return True
    rows = tensor.detach().resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
    data = rows.view(tensor.size(dim), -1).view(torch.uint8)
    return bool((data == data[:1]).all())


def one_row_each(tensor: Tensor, count: int, dim: int) -> tuple[Tensor, list[int]]:
    """Returns a tensor with one row for each of ``count`` ranks, and the sizes to cut it into.

    Args:
        tensor: Its rows along ``dim`` are equal.
        count: Ranks. If ``tensor`` has as many rows, rank i gets row i, so its gradient goes there.
        dim: Dimension to cut. Without rows there, each rank gets none.
    """
    size = tensor.size(dim)
    if size == 0:
        return tensor, [0] * count
    if size >= count:
        return tensor.narrow(dim, 0, count), [1] * count
    sizes = [-1] * tensor.dim()
    sizes[dim] = count
    return tensor.narrow(dim, 0, 1).expand(sizes), [1] * count
