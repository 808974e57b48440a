"""A tree of replicas that persists: made once, and brought up to date before each forward."""

import functools
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from pyparallel import _C
from pyparallel.detection import ModuleState
from pyparallel.mirror import mirror, mirrored, without_mirror
from pyparallel.rank_values import RankValues
from pyparallel.rewire import ATOMS, containers_in
from pyparallel.shells import ADDED_TO_SHELLS, bind, fill_shell, restore_compilation

_MISSING = object()
# How deep references among a tree's modules are looked for in what forward wrote.
_MAX_DEPTH = 3


class ReplicaTree:
    """One replica of a module for each rank.

    Attributes:
        roots: The replicas.
        values: The tensors that they hold.
    """

    def __init__(self, state: ModuleState, values: RankValues) -> None:
        self.values = values
        self._state = state
        # [rank][i] is the replica of module i.
        self._shells: list[list[nn.Module]] = [
            [type(module).__new__(type(module)) for module in state.modules] for _ in values.rows
        ]
        self.roots = [shells[0] for shells in self._shells]
        self._all = [shell for shells in self._shells for shell in shells]
        self._stale: set[int] = set()
        # Modules that were written back on some ranks, which have what the original has had then.
        self._uneven: set[int] = set()
        self._renew_substitutes()
        everything = range(len(self._all))
        for position in everything:
            self._fill(position)
        for position in everything:
            restore_compilation(self._all[position])
        self._look()
        self._clean = True
        self._idle = _C.reference_count(self._all)

    def is_ready(self, values: RankValues) -> bool:
        """Whether it equals the original, with these values, and nobody uses it."""
        return self._clean and not self._stale and self.values is values

    def is_free(self) -> bool:
        """Whether nobody uses it. If so, what forward wrote is undone."""
        return self._clean_unless_used(0)

    def release(self, references: int) -> None:
        """Undoes what forward wrote, as torch forgets it, unless somebody may still read it.

        Args:
            references: How many references to its modules the caller has.
        """
        self._clean_unless_used(references)

    def taken(self) -> None:
        """Notes that a forward may write to the replicas from now on."""
        self._clean = False

    def mark_stale(self, modules: Iterable[int]) -> None:
        """Notes that these modules of the original have changed."""
        self._stale.update(modules)

    def prepare(self, values: RankValues) -> None:
        """Makes a free tree equal to the original, with these values."""
        changed = self._stale
        self._stale = set()
        renewed = values is not self.values
        if renewed:
            self.values = values
            self._renew_substitutes()
            changed = changed.union(i for i, names in enumerate(self._state.rewired) if names)
        filled = {i for i in changed if i in self._uneven or not self._copy_plain_attributes(i)}
        self._uneven -= filled
        if renewed:
            self._bind_values(filled)
        count = len(self._state.modules)
        self._rewrite(rank * count + i for i in sorted(filled) for rank in range(len(self._shells)))
        self._idle = _C.reference_count(self._all)

    def _copy_plain_attributes(self, i: int) -> bool:
        """Gives the replicas of a module its numbers and strings. Returns whether that is all.

        As it is after ``train`` and ``eval``, which change every module.
        """
        module, replica = self._state.modules[i], self._shells[0][i]
        own, theirs = without_mirror(module), replica.__dict__
        changed = {k: v for k, v in own.items() if theirs.get(k, _MISSING) is not v}
        for kind in ("_modules", "_parameters", "_buffers"):
            del changed[kind]
        removed = theirs.keys() - own.keys() - ADDED_TO_SHELLS - mirrored(replica)
        if removed or not ATOMS.issuperset(map(type, changed.values())):
            return False
        count = len(self._state.modules)
        for rank, shells in enumerate(self._shells):
            shells[i].__dict__.update(changed)
            self._snapshot.update(rank * count + i)
        return True

    def _clean_unless_used(self, references: int) -> bool:
        users = _C.reference_count(self._all) - self._idle - references
        if self._clean:
            return users == 0
        dirty = self._dirty()
        if users and users != self._references_written(dirty):
            return False
        self._rewrite(dirty)
        count = len(self._state.modules)
        self._uneven.update(position % count for position in dirty)
        self._clean = True
        return True

    def _dirty(self) -> list[int]:
        """Returns the positions of the replicas' modules that are not as they were made."""
        dirty: dict[int, None] = {}
        index = self._snapshot.check()
        while index != -1:
            dirty[self._owners[index]] = None
            index = self._snapshot.check(index + 1)
        return list(dirty)

    def _references_written(self, dirty: Iterable[int]) -> int:
        """Returns how many references to modules of the tree forward stored in them."""
        own = set(map(id, self._all))
        written = sum(_count_references(self._all[p].__dict__, own, 0) for p in dirty)
        for position in dirty:
            clean = nn.Module.__new__(nn.Module)
            self._fill(position, clean)
            written -= _count_references(clean.__dict__, own, 0)
        return written

    def _rewrite(self, positions: Iterable[int]) -> None:
        positions = list(positions)
        for position in positions:
            self._fill(position)
            restore_compilation(self._all[position])
        count = len(self._state.modules)
        if any(self._state.rewired[position % count] for position in positions):
            self._look()  # they have new containers
        else:
            for position in positions:
                self._snapshot.update(position)

    def _fill(self, position: int, shell: nn.Module | None = None) -> None:
        rank, i = divmod(position, len(self._state.modules))
        module = self._state.modules[i]
        shell = shell or self._all[position]
        fill_shell(module, shell)
        bind(module, shell, self._state.rewired[i], self._substitutes[rank])
        mirror(shell)

    def _renew_substitutes(self) -> None:
        originals = list(map(id, self._state.originals))
        self._substitutes: list[Mapping[int, Any]] = [
            dict(zip(originals, [*shells, *row], strict=True))
            for shells, row in zip(self._shells, self.values.rows, strict=True)
        ]

    def _bind_values(self, besides: set[int]) -> None:
        count = len(self._state.modules)
        for i, entries in enumerate(self._state.entries):
            if entries and i not in besides:
                for rank, row in enumerate(self.values.rows):
                    attributes = self._shells[rank][i].__dict__
                    for kind, key, k in entries:
                        attributes[kind][key] = row[k]
                    self._snapshot.update(rank * count + i)

    def _look(self) -> None:
        """Takes the present state of all replicas as the clean one."""
        count = len(self._state.modules)
        self._owners = list(range(len(self._all)))
        containers: list[Any] = []
        for position, shell in enumerate(self._all):
            names = self._state.rewired[position % count]
            if names:
                own = containers_in(shell.__dict__[name] for name in names)
                containers += own
                self._owners += [position] * len(own)
        self._snapshot = _C.IdentitySnapshot([*self._all, *containers])


def _count_references(value: Any, targets: set[int], depth: int) -> int:
    if id(value) in targets:
        return 1
    if depth > _MAX_DEPTH:
        return 0
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    elif isinstance(value, MethodType):
        items = (value.__self__,)
    elif isinstance(value, functools.partial):
        items = (value.func, *value.args, *value.keywords.values())
    else:
        return 0
    return sum(_count_references(item, targets, depth + 1) for item in items)
