"""The tokens that a head with a vocabulary of its own can say: the target's most frequent ones."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.training.samples import Sample


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Draft ids and the target's; where both vocabularies are one, draft ids are the target's."""

    token_map: NDArray[np.int64]  # [V_draft]: the target's ids, rising
    target_size: int
    coverage: float
    """The share of the answers' tokens, of texts that it was not chosen by, that it holds."""

    def __len__(self) -> int:
        return len(self.token_map)

    @property
    def is_whole(self) -> bool:
        """Every token of the target is in it."""
        return len(self.token_map) == self.target_size

    def rows(
        self, given: torch.Tensor, token_ids: torch.Tensor, others: torch.Tensor
    ) -> torch.Tensor:
        """`others` [V_draft, H], with the rows `given` [N, H] for the target's `token_ids` [N]."""
        places = torch.from_numpy(self.draft_ids)[token_ids]
        known = places >= 0
        found = others.detach().clone()
        found[places[known]] = given[known]
        return found

    @property
    def draft_ids(self) -> NDArray[np.int64]:
        """[V]: the draft id of each of the target's tokens; -1 where it has none."""
        found = np.full(self.target_size, -1)
        found[self.token_map] = np.arange(len(self))
        return found

    @property
    def offsets(self) -> NDArray[np.int64]:
        """`d2t` [V_draft]: what is added to a draft id."""
        return self.token_map - np.arange(len(self))


def choose_vocabulary(
    train: Iterable[Sample], held_out: Iterable[Sample], size: int, target_size: int
) -> DraftVocabulary:
    """The `size` tokens that answers hold most often.

    Among equals those come first that the target finds likely most often, then the lower ids.
    """
    counts, mass = _frequencies(train, target_size)
    order = np.lexsort((np.arange(target_size), -mass, -counts))
    token_map = np.sort(order[:size]).astype(np.int64)
    seen, _ = _frequencies(held_out, target_size)
    return DraftVocabulary(token_map, target_size, float(seen[token_map].sum() / seen.sum()))


def _frequencies(
    samples: Iterable[Sample], target_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of each token [V]: how often answers hold it, and its probability summed over answers."""
    counts, mass = np.zeros(target_size, np.int64), np.zeros(target_size)
    for sample in samples:
        places = np.flatnonzero(sample.is_answer.numpy()[1:])
        counts += np.bincount(sample.token_ids.numpy()[places + 1], minlength=target_size)
        top_ids, top_probs = sample.top_ids.numpy()[places], sample.top_probs.numpy()[places]
        mass += np.bincount(top_ids.ravel(), top_probs.ravel(), target_size)
    return counts, mass
