"""Cache entries of texts that were computed before, for requests that begin with the same tokens.

A tree of blocks: each holds the entries of up to `BLOCK_TOKENS` tokens and hangs below the block
of the tokens before them, so that texts share what they have in common.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Tokens = tuple[int, ...]
BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Entries:
    """Of some neighbouring tokens, in the target's cache and in that of the drafter."""

    target: Floats  # [L, kinds, Hkv, n, D]
    drafter: Floats | None = None
    """None where the drafter has no cache, or had not computed these tokens."""

    @property
    def size_bytes(self) -> int:
        """Memory that they take."""
        return self.target.nbytes + (0 if self.drafter is None else self.drafter.nbytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries of the tokens [start, stop) of a text, and possibly of some after them."""

    start: int
    stop: int
    entries: Entries


@dataclass(slots=True, eq=False)
class _Block:
    """Invariant: only a block of `BLOCK_TOKENS` tokens has children."""

    token_ids: Tokens
    parent: "_Block | None" = None
    entries: Entries | None = None  # None at the root alone
    children: dict[Tokens, "_Block"] = field(default_factory=dict)


class PrefixCache:
    """Holds at most `max_bytes` of entries; the least recently used go first. 0 holds nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._root = _Block(())
        # From the least to the most recently used. A parent is always used after its children,
        # so that the first one has none.
        self._by_use: OrderedDict[_Block, None] = OrderedDict()
        self.size_bytes = 0

    @property
    def is_off(self) -> bool:
        """True where nothing is kept."""
        return self._max_bytes == 0

    def put(self, token_ids: Sequence[int], read: Callable[[int, int], Entries]) -> None:
        """Keep what is not known of a text; `read(start, stop)` copies entries.

        Where it raises, the text is kept up to there.
        """
        path: list[_Block] = []
        try:
            self._extend(path, token_ids, read)
        finally:
            self._use(path)
            self._shrink()

    def forget(self, token_ids: Sequence[int], start: int) -> None:
        """Drop the blocks of a text from token `start` on, with all that hangs below them."""
        block, first = self._root, 0
        while found := self._best_child(block, token_ids[first : first + BLOCK_TOKENS]):
            block, num_known = found
            if num_known < len(block.token_ids):
                return  # of another text
            if first >= start:
                for below in reversed([block, *_below(block)]):
                    self._drop(below)
                return
            first += num_known

    def longest(self, token_ids: Sequence[int]) -> list[Piece]:
        """Entries of the longest known prefix, from the first token on; maybe nothing."""
        block, pieces, path = self._root, [], []
        start = 0
        while found := self._best_child(block, token_ids[start : start + BLOCK_TOKENS]):
            block, num_shared = found
            assert block.entries is not None
            pieces.append(Piece(start, start + num_shared, block.entries))
            path.append(block)
            start += num_shared
            if num_shared < BLOCK_TOKENS:
                break
        self._use(path)
        return pieces

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the tree, the order of use and the sizes disagree."""
        found = list(_below(self._root))
        assert set(found) == set(self._by_use)
        assert self.size_bytes == sum(b.entries.size_bytes for b in found if b.entries)
        assert self.size_bytes <= self._max_bytes
        order = {block: i for i, block in enumerate(self._by_use)}
        assert all(b.parent is self._root or order[b] < order[b.parent] for b in found if b.parent)

    def _extend(
        self, path: list[_Block], token_ids: Sequence[int], read: Callable[[int, int], Entries]
    ) -> None:
        """Add the blocks of a text that are missing; those that it goes through go to `path`."""
        block = self._root
        for start in range(0, len(token_ids), BLOCK_TOKENS):
            tokens = tuple(token_ids[start : start + BLOCK_TOKENS])
            if tokens not in block.children and not self._covers(block, tokens):
                self._add(block, tokens, read(start, start + len(tokens)))
            if tokens not in block.children:
                break  # a longer block has these tokens, the last ones
            block = block.children[tokens]
            path.append(block)

    def _best_child(self, block: _Block, tokens: Sequence[int]) -> tuple[_Block, int] | None:
        """The child that shares the most first tokens, and how many; None if none does."""
        if whole := block.children.get(tuple(tokens)):
            return whole, len(tokens)
        shared = {
            child: num_shared(child.token_ids, tokens)
            for child in block.children.values()
            if tokens and child.token_ids[0] == tokens[0]
        }
        return max(shared.items(), key=lambda item: item[1]) if shared else None

    def _covers(self, block: _Block, tokens: Tokens) -> bool:
        """True where a child begins with these tokens."""
        found = self._best_child(block, tokens)
        return found is not None and found[1] == len(tokens)

    def _add(self, parent: _Block, tokens: Tokens, entries: Entries) -> None:
        found = self._best_child(parent, tokens)
        if found is not None and found[1] == len(found[0].token_ids):
            self._drop(found[0])  # the new one begins with it
        block = _Block(tokens, parent, entries)
        parent.children[tokens] = block
        self._by_use[block] = None
        self.size_bytes += entries.size_bytes

    def _drop(self, block: _Block) -> None:
        assert not block.children
        assert block.parent is not None
        assert block.entries is not None
        del block.parent.children[block.token_ids]
        del self._by_use[block]
        self.size_bytes -= block.entries.size_bytes

    def _use(self, path: Sequence[_Block]) -> None:
        for block in reversed(path):
            self._by_use.move_to_end(block)

    def _shrink(self) -> None:
        while self.size_bytes > self._max_bytes:
            self._drop(next(iter(self._by_use)))


def num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two texts have in common."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def _below(block: _Block) -> list[_Block]:
    """All blocks below, each after its parent; texts are longer than Python's stack is deep."""
    found = list(block.children.values())
    for child in found:
        found += child.children.values()
    return found
