"""Who else refers to a tensor of ours: counts of references, against the number of our own."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyparallel import _C

_storage_use_count: Any = torch._C._storage_Use_Count
# Private, so it may go. Without it nobody knows what graphs hold.
_use_count: Any = getattr(Tensor, "_use_count", None)


def _graphs_refer_to_python_objects() -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        saved = torch.ones(1, device="cpu")
        before = sys.getrefcount(saved)
        product = saved * torch.ones(1, device="cpu", requires_grad=True)
        after = sys.getrefcount(saved)
        del product
    return after > before


# As newer versions of torch do. In older ones the C++ object has a count of its own.
_PYTHON_COUNTS = _graphs_refer_to_python_objects()


class OwnedTensors:
    """Tensors to which only we refer, unless a graph or the user keeps one.

    A graph holds what it saved, and a view holds its base. Our own references come and go with
    replicas: ``accounted`` keeps their number up to date.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._references: int | None = None  # not known before our own are all there
        self._uses = 0

    def count(self) -> int:
        """Returns the present number of references to the Python objects."""
        return _C.reference_count(self._tensors)

    def held(self) -> bool:
        """Whether anybody but us refers to one of the tensors."""
        if self._references is None:  # new, and nobody has seen them yet
            return False
        if self.count() != self._references:
            return True
        return not _PYTHON_COUNTS and (_use_count is None or self._count_uses() != self._uses)

    def add(self, references: int) -> None:
        """Counts more references as our own."""
        if self._references is None:
            self._references = references
            self._uses = self._count_uses()
        else:
            self._references += references

    def confuse(self) -> None:
        """Counts the tensors as held from now on, because our own references cannot be told."""
        self._references = -(2**62)

    def _count_uses(self) -> int:
        return 0 if _use_count is None else sum(map(_use_count, self._tensors))


@contextmanager
def accounted(owned: list[OwnedTensors]) -> Iterator[None]:
    """Counts the references that are made and dropped meanwhile as our own.

    Tensors that come into the list meanwhile are ours alone.
    """
    before = [(tensors, tensors.count()) for tensors in owned]
    try:
        yield
    except BaseException:
        for tensors in owned:
            tensors.confuse()
        raise
    known = {id(tensors): count for tensors, count in before}
    for tensors in owned:
        tensors.add(tensors.count() - known.get(id(tensors), 0))


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors lie in a storage, and one for the Python object."""
    uses: int = _storage_use_count(storage._cdata)
    return uses
