"""Buckets: which tensors are broadcast, and which gradients are summed, in one operation."""

from collections.abc import Sequence

from torch import Tensor

BUCKET_BYTES = 25 << 20
# Gradients of the last layers come first. A small bucket for them lets the first sum start early.
FIRST_BUCKET_BYTES = 1 << 20


def assign_buckets(tensors: Sequence[Tensor], cap_bytes: int | None = None) -> list[list[int]]:
    """Groups tensors into buckets, in the order in which backward completes them.

    The tensors are walked in reverse, because backward produces the gradients of the last ones
    first. A bucket holds one dtype, and only tensors that require a gradient or only tensors that
    do not. It is closed by the tensor that brings it to ``FIRST_BUCKET_BYTES``, if it is the first
    of its kind, or to ``cap_bytes``; so it holds at least one tensor, and only its last tensor
    may exceed the limit.

    Args:
        tensors: Parameters and buffers, in the order of their modules.
        cap_bytes: Default: ``BUCKET_BYTES``. A smaller one also limits the first buckets.

    Returns:
        For each bucket the indices of its tensors, in descending order. Every index occurs once.

    Raises:
        ValueError: A parameter of a lazy module has no shape yet.
    """
    buckets: list[list[int]] = []
    growing: dict[object, tuple[list[int], int]] = {}
    limits: dict[object, int] = {}
    cap_bytes = BUCKET_BYTES if cap_bytes is None else cap_bytes
    first_bytes = min(FIRST_BUCKET_BYTES, cap_bytes)
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.requires_grad)
        bucket, nbytes = growing.get(kind, ([], 0))
        bucket.append(index)
        nbytes += tensor.numel() * tensor.element_size()
        growing[kind] = bucket, nbytes
        if nbytes >= limits.get(kind, first_bytes):
            buckets.append(bucket)
            del growing[kind]
            limits[kind] = cap_bytes
    buckets.extend(bucket for bucket, _ in growing.values())
    # A bucket is complete when the gradient of its first module, the smallest index, has arrived.
    return sorted(buckets, key=lambda bucket: -bucket[-1])
