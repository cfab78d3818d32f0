"""A data set as batches of one head."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from specexport.training.batches import batch_order, epoch_batches
from specexport.training.packing import Packed, pack
from specexport.training.samples import Dataset, Split


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What a head reads of a data set; batches hold at most `batch_tokens`, or one text."""

    dataset: Dataset
    columns: Sequence[int]
    """Of the states."""
    num_draft_steps: int
    batch_tokens: int
    long_share: float = 1.0
    """Of the texts of a training batch."""

    def train(self, seed: int, first: int, stride: int = 1) -> Iterator[Packed]:
        """Endless: each `stride`-th batch from number `first` on."""
        order = batch_order(self._shards("train"), *self._sizes, seed)
        batches = islice(order, first, None, stride)
        return (self._pack(batch, self.long_share) for batch in batches)

    def held_out(self, num_tokens: float = math.inf) -> Iterator[Packed]:
        """The held-out texts in a fixed order, until so many tokens are reached."""
        for batch in epoch_batches(self._shards("held_out"), *self._sizes, [0, 0]):
            if num_tokens <= 0:
                return
            yield self._pack(batch, 1.0)
            num_tokens -= sum(self.dataset.lengths[i] for i in batch)

    def num_train_batches(self, seed: int) -> int:
        """Of the first epoch."""
        return sum(1 for _ in epoch_batches(self._shards("train"), *self._sizes, [seed, 0]))

    @property
    def _sizes(self) -> tuple[list[int], int]:
        return self.dataset.lengths, self.batch_tokens

    def _shards(self, split: Split) -> list[list[int]]:
        """The numbers of the texts, by shard."""
        chosen, found, first = set(self.dataset.split(split)), [], 0
        for shard in self.dataset.spec.shards:
            after = first + len(shard.lengths)
            found.append([i for i in range(first, after) if i in chosen])
            first = after
        return found

    def _pack(self, batch: Sequence[int], long_share: float) -> Packed:
        samples = [self.dataset[i] for i in batch]
        return pack(samples, self.columns, self.num_draft_steps, long_share)
