"""What a drafter proposes."""

from collections.abc import Sequence
from dataclasses import dataclass

from specexport.runtime.distribution import Distribution
from specexport.runtime.tree import ROOT, chain_parents, tree_shape


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations of a text: a tree below its last token; a chain is one of width 1.

    Node i continues node `parents[i]` (-1: the text) with `token_ids[i]`; parents come before
    their children. Siblings are different tokens, in the order in which they were drawn:
    `probs[i]` is what `token_ids[i]` was drawn from once the earlier ones were drawn. A node that
    was not drawn at random has one-hot `probs`.
    """

    token_ids: tuple[int, ...] = ()  # [n]
    parents: tuple[int, ...] = ()  # [n]
    probs: tuple[Distribution, ...] = ()  # [n]

    @classmethod
    def chain(cls, token_ids: Sequence[int], probs: Sequence[Distribution]) -> "Draft":
        """Each token after the one before it."""
        return cls(tuple(token_ids), chain_parents(len(token_ids)), tuple(probs))

    @classmethod
    def certain(cls, token_ids: Sequence[int]) -> "Draft":
        """A chain that was not drawn at random."""
        return cls.chain(token_ids, [Distribution.one_hot(t) for t in token_ids])

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return int(tree_shape(self.parents).depths.max()) + 1 if self.parents else 0

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from the first level down to `node`; none for the root."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def cut(self, depth: int) -> "Draft":
        """The first `depth` levels."""
        if not self.parents or depth >= self.depth:
            return self
        depths = tree_shape(self.parents).depths
        return self.kept([node for node in range(len(self)) if depths[node] < depth])

    def num_first(self, path: Sequence[int]) -> int:
        """How many nodes of a path, from its beginning, are the first of their siblings."""
        children = tree_shape(self.parents).children
        for i, node in enumerate(path):
            if children[self.parents[node]][0] != node:
                return i
        return len(path)

    def kept(self, nodes: Sequence[int]) -> "Draft":
        """The draft of some nodes, ascending and closed under parents."""
        number = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return Draft(
            tuple(self.token_ids[node] for node in nodes),
            tuple(number[self.parents[node]] for node in nodes),
            tuple(self.probs[node] for node in nodes),
        )
