"""NumPy and CuPy arrays as torch tensors on the same memory, and results as the kind that came in.

Neither library is imported here: whoever has an array has imported its library.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_tensor(array: object) -> Tensor:
    """Returns a tensor on the memory of an array; a tensor as it is.

    NumPy arrays that torch cannot share (negative strides) are copied. A CuPy array is ordered by
    streams: torch's current stream waits for CuPy's.

    Raises:
        TypeError: Neither a tensor nor an array, an array of a dtype that torch lacks, or a masked
            array.
    """
    if isinstance(array, Tensor):
        return array
    if _is_array(array, "numpy"):
        _refuse_mask(array)
        return _from_numpy(array)
    if _is_array(array, "cupy"):
        return torch.from_dlpack(array)  # type: ignore[attr-defined]
    raise TypeError(
        f"expected a torch tensor, a NumPy array or a CuPy array, but got {type(array).__name__}"
    )


def to_output(array: object, index: int) -> Tensor:
    """Returns a tensor that writes to the memory of output ``index``.

    Raises:
        ValueError: A NumPy array that is read-only or that torch cannot share.
        TypeError: A masked array.
    """
    if not _is_array(array, "numpy"):
        return to_tensor(array)
    numpy_array: Any = array
    _refuse_mask(numpy_array)
    if not numpy_array.flags.writeable:
        raise ValueError(f"output array at index {index} is read-only")
    return torch.from_numpy(numpy_array)


def to_kind_of(array: object, result: Tensor) -> Any:
    """Returns a result as the kind of ``array``.

    A NumPy array cannot be on a GPU and a CuPy array cannot be elsewhere: a result of NumPy arrays
        on a
    GPU is a tensor, a result of CuPy arrays on the CPU is a NumPy array.
    """
    if isinstance(array, Tensor):
        return result
    if _is_array(array, "cupy") and result.is_cuda:
        # This also makes CuPy's current stream wait for torch's.
        return sys.modules["cupy"].from_dlpack(result)
    return result if result.is_cuda else result.numpy()


def publish_output(array: object, written: Tensor) -> None:
    """Orders later work of the array's library after what was written to its memory."""
    if _is_array(array, "cupy"):
        sys.modules["cupy"].from_dlpack(written)  # its current stream waits for torch's


def published(arrays: Sequence[Any], written: Sequence[Tensor]) -> tuple[Any, ...]:
    """Applies ``publish_output`` to every output and returns the arrays themselves."""
    for array, output in zip(arrays, written, strict=True):
        publish_output(array, output)
    return tuple(arrays)


def _is_array(array: object, library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(array, module.ndarray)


def _refuse_mask(array: Any) -> None:
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(
            "expected an array without a mask, which a transfer would lose, but got a MaskedArray "
            f"of shape {list(array.shape)}; pass array.filled(value) or array.data"
        )


def _from_numpy(array: Any) -> Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    try:
        return torch.from_dlpack(array)  # type: ignore[attr-defined]
    except (BufferError, RuntimeError):
        # NumPy before 2.1 exports no read-only arrays.
        return torch.from_numpy(array.copy())
