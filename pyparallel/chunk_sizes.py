"""How many rows of a batch each rank gets."""

from typing import Literal

Split = Literal["chunk", "balanced"]


def check_split(split: str) -> None:
    """Raises ValueError unless ``split`` is one of ``Split``."""
    if split not in ("chunk", "balanced"):
        raise ValueError(f"split must be 'chunk' or 'balanced', but is {split!r}")


def chunk_sizes(size: int, nranks: int, split: Split = "chunk") -> list[int]:
    """Returns the sizes of successive chunks, one for each rank that is used.

    Args:
        size: Rows to split. If there are none, every rank gets an empty chunk.
        nranks: Ranks that there are.
        split: "chunk" is the rule of ``torch.chunk``: all chunks have the rounded-up size, the last
            one has what is left, and there may be fewer chunks than ranks although there are
            enough rows. With "balanced", sizes differ by at most one, larger ones first, and
            every rank gets a row if there are enough.
    """
    if size == 0:
        return [0] * nranks
    if split == "balanced":
        used = min(size, nranks)
        return [size // used + (rank < size % used) for rank in range(used)]
    chunk = -(-size // nranks)
    return [min(chunk, size - start) for start in range(0, size, chunk)]
