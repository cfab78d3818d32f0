"""How a draft grows from a model's logits, level by level: chains, static and dynamic trees.

Sources: SpecInfer (arXiv 2305.09781), EAGLE (2401.15077) and Medusa (2401.10774) for static
trees; EAGLE-2 (2406.16858) for the dynamic one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specexport.errors import ConfigError
from specexport.runtime.adaptive import DraftShape
from specexport.runtime.distribution import Distribution, top_ids
from specexport.runtime.draft import Draft
from specexport.runtime.picking import Picker
from specexport.runtime.token_map import TokenMap
from specexport.runtime.tree import ROOT

Logits = NDArray[np.float32]  # [V]
MAX_NODES = 1024
"""Of one draft."""


@dataclass(slots=True)
class Nodes:
    """A draft while it grows. The lists run in parallel; parents come before their children."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)

    def add(self, parent: int, token_id: int, probs: Distribution) -> int:
        """Append a node; its number."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.probs.append(probs)
        return len(self.token_ids) - 1

    def draft(self, kept: Sequence[int] | None = None) -> Draft:
        """The draft of all nodes, or of `kept` ones, ascending and closed under parents."""
        whole = Draft(tuple(self.token_ids), tuple(self.parents), tuple(self.probs))
        return whole if kept is None else whole.kept(kept)

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from the first level down to `node`; none for the root."""
        return Draft(tuple(self.token_ids), tuple(self.parents)).path(node)


class Growth(Protocol):
    """One draft that is being grown."""

    frontier: list[int]
    """Nodes that the drafter must compute next; `ROOT` first, nothing when the draft is done."""
    nodes: Nodes

    def grow(self, logits: Sequence[Logits]) -> None:
        """Add children below each node of the frontier from its logits; set the next frontier.

        A token whose logit is -inf becomes no child.
        """
        ...

    def kept(self) -> list[int]:
        """The nodes that make the draft, ascending and closed under parents."""
        ...


class Grower(Protocol):
    """The shape that drafts are grown in."""

    depth: int
    """Tokens on the longest path of a whole draft."""
    max_nodes: int
    """Most nodes of a draft, and of what is computed for one."""

    width: int
    """Children of a node at the most."""

    def shape(self, depth: int) -> DraftShape:
        """What drafts of that depth consist of."""
        ...

    def narrowed(self, width: int) -> "Grower":
        """The shape with no more than `width` children of a node, the likeliest."""
        ...

    def start(self, picker: Picker, position: int, depth: int) -> Growth:
        """Begin a draft of at most `depth` levels whose first token will stand at `position`."""
        ...


Choice = tuple[int, ...]
"""A node of a static tree: the rank of each token on the path to it, 0 the likeliest."""


class StaticTree:
    """A tree of one shape: node (0, 2) is the third choice after the first choice of the root.

    What token a rank stands for is the picker's business.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        """Raises `ConfigError` where a path lacks its beginning or is there twice."""
        self.choices = sorted(choices, key=lambda choice: (len(choice), choice))
        check_choices(self.choices)
        self.depth = len(self.choices[-1])
        self.width = 1 + max(rank for choice in self.choices for rank in choice)
        self.max_nodes = len(self.choices)
        self.children: dict[Choice, list[Choice]] = {}
        for choice in self.choices:
            self.children.setdefault(choice[:-1], []).append(choice)

    @classmethod
    def chain(cls, length: int) -> "StaticTree":
        """The tree of width one."""
        return cls([(0,) * depth for depth in range(1, length + 1)])

    def shape(self, depth: int) -> DraftShape:
        """The nodes down to `depth`; the inner ones of each level are computed together."""
        kept = [choice for choice in self.choices if len(choice) <= depth]
        inner = [choice for choice in self.children if choice and len(choice) < depth]
        levels = range(1, min(depth, self.depth))
        widths = tuple(sum(len(choice) == level for choice in inner) for level in levels)
        num_steps = (1, *widths) if depth else ()
        return DraftShape(depth, len(kept), num_steps, self.width)

    def narrowed(self, width: int) -> "StaticTree":
        """The nodes on whose path no rank is beyond `width`."""
        kept = [choice for choice in self.choices if max(choice) < width]
        return StaticTree(kept) if kept and len(kept) < len(self.choices) else self

    def start(self, picker: Picker, position: int, depth: int) -> Growth:
        """Begin a draft."""
        return _StaticGrowth(self, picker, position, depth)


def check_choices(choices: Sequence[Choice]) -> None:
    """Raise `ConfigError` unless the paths form a tree."""
    known: set[Choice] = {()}
    if () in choices:
        raise ConfigError("The tree has an empty path. Every path names at least one rank: [0].")
    for choice in sorted(choices, key=len):
        if choice[:-1] not in known or choice in known or min(choice, default=-1) < 0:
            problem = (
                "is there twice"
                if choice in known
                else f"needs {list(choice[:-1])}, which is missing"
            )
            raise ConfigError(
                f"The tree's path {list(choice)} {problem}. Every path is a list of ranks from 0 "
                "up, stands once, and all its beginnings are paths too."
            )
        known.add(choice)
    if len(known) == 1:
        raise ConfigError("The tree has no path. Give at least [[0]].")
    if len(known) > MAX_NODES + 1:
        raise ConfigError(
            f"The tree has {len(known) - 1} paths; at most {MAX_NODES} are supported. "
            "Leave some out."
        )


class _StaticGrowth:
    def __init__(self, tree: StaticTree, picker: Picker, position: int, depth: int) -> None:
        self._tree, self._picker = tree, picker
        self._position, self._depth = position, depth
        self.nodes = Nodes()
        self.frontier = [ROOT]
        self._choices: dict[int, Choice] = {ROOT: ()}

    def grow(self, logits: Sequence[Logits]) -> None:
        grown = []
        for node, scores in zip(self.frontier, logits, strict=True):
            choices = self._tree.children[self._choices[node]]
            for choice, child in zip(choices, self._children(node, choices, scores), strict=False):
                self._choices[child] = choice
                grown.append(child)
        self.frontier = [
            node
            for node in grown
            if len(self._choices[node]) < self._depth and self._choices[node] in self._tree.children
        ]

    def kept(self) -> list[int]:
        return list(range(len(self.nodes.token_ids)))

    def _children(self, parent: int, choices: Sequence[Choice], scores: Logits) -> Iterator[int]:
        """Nodes for as many of the choices as there are tokens."""
        ranks, position = [choice[-1] for choice in choices], self._position + len(choices[0]) - 1
        picks = self._picker.pick(scores, ranks, position, len(self.nodes.token_ids))
        for token_id, probs in picks:
            yield self.nodes.add(parent, token_id, probs)


class DynamicTree:
    """EAGLE-2's tree: paths with the largest probability, by the drafter's own account.

    Each level computes the `top_k` likeliest paths so far and gives each `top_k` children; in the
    end the `num_nodes` likeliest nodes of all are kept. They are certain, at any temperature.
    """

    def __init__(self, depth: int, top_k: int, num_nodes: int) -> None:
        """`depth` counts levels of drafted tokens, the children of the text included."""
        self.depth, self.top_k, self.num_nodes = depth, top_k, num_nodes
        self.width = top_k
        self.max_nodes = max(num_nodes, top_k * (depth - 1))

    def shape(self, depth: int) -> DraftShape:
        """The likeliest paths of each level are computed together."""
        depth = min(depth, self.depth)
        grown = self.top_k + max(depth - 1, 0) * self.top_k**2 if depth else 0
        widths = (1, *[self.top_k] * (depth - 1))[:depth]
        return DraftShape(depth, min(self.num_nodes, grown), widths, self.top_k)

    def narrowed(self, width: int) -> "DynamicTree":
        """Paths with fewer children each."""
        if width >= self.top_k:
            return self
        return DynamicTree(self.depth, width, min(self.num_nodes, width * self.depth))

    def start(self, picker: Picker, position: int, depth: int) -> Growth:
        """Begin a draft."""
        return _DynamicGrowth(self, min(depth, self.depth), picker.token_map)


class _DynamicGrowth:
    def __init__(self, tree: DynamicTree, depth: int, token_map: TokenMap) -> None:
        self._tree, self._depth, self._token_map = tree, depth, token_map
        self.nodes = Nodes()
        self.frontier = [ROOT]
        self._scores: list[float] = []  # cumulative log-probability of each node
        self._level = 0

    def grow(self, logits: Sequence[Logits]) -> None:
        first = len(self._scores)
        for node, scores in zip(self.frontier, logits, strict=True):
            self._add_children(node, scores)
        self._level += 1
        grown = np.array(self._scores[first:], dtype=np.float32)
        num_kept = self._tree.top_k if self._level < self._depth else 0
        self.frontier = sorted(first + int(i) for i in top_ids(grown, num_kept))

    def kept(self) -> list[int]:
        """The likeliest nodes; a parent, which comes first, before a child that is as likely."""
        order = np.argsort(-np.array(self._scores), kind="stable")[: self._tree.num_nodes]
        return sorted(int(node) for node in order)

    def _add_children(self, parent: int, logits: Logits) -> None:
        above = self._scores[parent] if parent != ROOT else 0.0
        shared = logits[: self._token_map.num_shared]
        largest = float(shared.max())
        if not np.isfinite(largest):
            return
        total = largest + float(np.log(np.exp(shared - largest).sum()))
        for draft_id in self._token_map.top(logits, self._tree.top_k):
            token_id = self._token_map.to_target(draft_id)
            self.nodes.add(parent, token_id, Distribution.one_hot(token_id))
            self._scores.append(above + min(float(shared[draft_id]) - total, 0.0))
