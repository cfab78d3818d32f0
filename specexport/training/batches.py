"""Which texts each step learns from: a function of the seed, so any step can be gone on from."""

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

_TOGETHER = 4
"""Shards whose texts are mixed: few, since only some stay open."""


def batch_order(
    shards: Sequence[Sequence[int]], lengths: Sequence[int], num_tokens: int, seed: int
) -> Iterator[tuple[int, ...]]:
    """Endless batches of texts of together at most `num_tokens`, longer ones alone.

    `shards` are the texts that lie together, `lengths` the tokens of all texts. Each epoch goes
    through all texts in an order of its own.
    """
    for epoch in count():
        yield from epoch_batches(shards, lengths, num_tokens, [seed, epoch])


def epoch_batches(
    shards: Sequence[Sequence[int]], lengths: Sequence[int], num_tokens: int, seed: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """The batches of one epoch."""
    random = np.random.default_rng(seed)
    order = [shards[i] for i in random.permutation(len(shards))]
    batch: list[int] = []
    for start in range(0, len(order), _TOGETHER):
        texts = [i for shard in order[start : start + _TOGETHER] for i in shard]
        for i in random.permutation(texts):
            if batch and sum(lengths[j] for j in batch) + lengths[i] > num_tokens:
                yield tuple(batch)
                batch = []
            batch.append(int(i))
    yield tuple(batch)
