"""From a drafter's token ids to the target's."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.constraint import Mask
from specexport.runtime.distribution import Distribution, to_distribution, top_ids
from specexport.runtime.params import SamplingParams

Logits = NDArray[np.float32]  # [V_draft]


@dataclass(frozen=True, slots=True)
class TokenMap:
    """From a drafter's ids to the target's: the first `num_shared` ids, or through `target_ids`."""

    num_shared: int
    target_ids: NDArray[np.int64] | None = None  # [V_draft]

    def to_target(self, token_id: int) -> int:
        """The target's id of a draft id."""
        return token_id if self.target_ids is None else int(self.target_ids[token_id])

    def distribution(self, logits: Logits, params: SamplingParams) -> Distribution | None:
        """What `params` make of a drafter's logits, over the target's ids.

        None where there is nothing to draw: of -inf alone, and of NaN, since a drafter that fails
        costs time and nothing else.
        """
        shared = logits[: self.num_shared]
        if not np.isfinite(shared.max()):
            return None
        found = to_distribution(shared, params)
        if self.target_ids is None:
            return found
        token_ids = self.target_ids[found.token_ids]
        order = np.argsort(token_ids)
        return Distribution(token_ids[order], found.probs[order])

    def top(self, logits: Logits, count: int) -> list[int]:
        """The drafter's `count` likeliest ids, best first; none whose logit is -inf or NaN."""
        best = top_ids(logits[: self.num_shared], count)
        return [int(i) for i in best if logits[i] > -np.inf]

    def masked(self, logits: Logits, allowed: Mask) -> Logits:
        """A drafter's logits, -inf where the target's `allowed` forbids the token."""
        known = allowed if self.target_ids is None else allowed[self.target_ids]
        kept = known[: self.num_shared]
        return np.where(kept, logits[: self.num_shared], np.float32(-np.inf))
