"""The shape of a drafted tree: who descends from whom. A chain is the tree of width one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROOT = -1
"""The parent of a tree's first nodes: the last token of the text."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What follows from each node's parent; nodes come after their parents."""

    depths: NDArray[np.int64]  # [n], 0 for children of the root
    sees: NDArray[np.bool_]  # [n, n]: a node sees its ancestors and itself
    children: dict[int, tuple[int, ...]]
    """Of each node that has some, and of `ROOT`; in the order of their numbers."""


@lru_cache(maxsize=64)
def tree_shape(parents: tuple[int, ...]) -> TreeShape:
    """The shape of a tree; the arrays are shared, do not write to them."""
    n = len(parents)
    depths, sees = np.zeros(n, dtype=np.int64), np.eye(n, dtype=np.bool_)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
        if parent != ROOT:
            depths[node] = depths[parent] + 1
            sees[node] |= sees[parent]
    return TreeShape(depths, sees, {node: tuple(below) for node, below in children.items()})


def chain_parents(length: int) -> tuple[int, ...]:
    """Each node below the one before it."""
    return tuple(range(ROOT, length - 1))


@dataclass(frozen=True, slots=True)
class Branches:
    """The end of a batch row where it is part of a tree: its last `len(sees)` tokens.

    `base` is the cache index, and the position, of a node of depth 0. The tree's entries follow
    from there, m of them with those of this row, which are the last.
    """

    base: int
    depths: NDArray[np.int64]  # [m]
    sees: NDArray[np.bool_]  # [q, m]


def whole_tree(base: int, parents: Sequence[int]) -> Branches:
    """All nodes of a tree in one row."""
    shape = tree_shape(tuple(parents))
    return Branches(base, shape.depths, shape.sees)
