"""The trees of replicas of one module, from which each forward takes one.

A tree is free when nobody but us refers to its modules. A checkpoint inside the module, another
thread, or whoever keeps a replica holds it, and then the next forward takes another one: the
holder will read the weights and attributes that the replica has now.
"""

from collections.abc import Iterable

from torch import nn

from pyparallel.detection import ModuleState
from pyparallel.owned import OwnedTensors
from pyparallel.rank_values import RankValues
from pyparallel.replica_tree import ReplicaTree

# Beyond these, a tree in use is left to its users.
_MAX_TREES = 8


class TreePool:
    """The trees of one module."""

    def __init__(self) -> None:
        self._trees: list[ReplicaTree] = []

    def take_ready(self, values: RankValues) -> ReplicaTree | None:
        """Returns a tree that needs no work."""
        for tree in self._trees:
            if tree.is_ready(values):
                tree.taken()
                return tree
        return None

    def take(
        self, state: ModuleState, values: RankValues, present: list[RankValues]
    ) -> ReplicaTree:
        """Returns a free tree, or a new one.

        Args:
            state: The module.
            values: What its replicas shall hold.
            present: All values that forwards may ask for, with and without gradients.
        """
        free = [tree for tree in self._trees if tree.is_free()]
        same = [tree for tree in free if tree.values is values]
        outdated = [tree for tree in free if not any(tree.values is v for v in present)]
        tree = next(iter(same or outdated), None)
        # Outdated values hold memory that nobody needs.
        self._trees = [t for t in self._trees if t is tree or not any(t is o for o in outdated)]
        if tree is not None:
            tree.prepare(values)
        else:
            if len(self._trees) >= _MAX_TREES:
                for copies in self._trees.pop(0).values.copies:
                    copies.confuse()
            tree = ReplicaTree(state, values)
            self._trees.append(tree)
        tree.taken()
        return tree

    def abandon(self) -> None:
        """Gives up all trees. Those in use go on to refer to our tensors."""
        for tree in self._trees:
            if not tree.is_free():
                for copies in tree.values.copies:
                    copies.confuse()

    def find(self, root: nn.Module) -> ReplicaTree | None:
        """Returns the tree with this replica for rank 0."""
        return next((tree for tree in self._trees if tree.roots[0] is root), None)

    def in_use(self, tensors: OwnedTensors) -> bool:
        """Whether a tree that is in use holds some of these tensors."""
        return any(
            any(copies is tensors for copies in tree.values.copies) and not tree.is_free()
            for tree in self._trees
        )

    def mark_stale(self, modules: Iterable[int]) -> None:
        """Notes that these modules of the original have changed."""
        for tree in self._trees:
            tree.mark_stale(modules)
