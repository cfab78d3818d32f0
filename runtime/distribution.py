"""Probabilities over the vocabulary, kept on their support alone.

Greedy decoding and deterministic drafters are one-hot distributions, so that verification needs
no branch for them; top-k and top-p leave a short support.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.errors import EngineError
from specexport.runtime.params import SamplingParams

_FIRST_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Distribution:
    """`probs[i]` is the probability of `token_ids[i]`; ids ascend, probabilities sum to 1."""

    token_ids: NDArray[np.int64]  # [n]
    probs: NDArray[np.float64]  # [n]

    @classmethod
    def one_hot(cls, token_id: int) -> "Distribution":
        """All probability on one token."""
        return cls(np.array([token_id], dtype=np.int64), np.ones(1))

    @property
    def is_one_hot(self) -> bool:
        """True when a single token has all the probability."""
        return len(self.token_ids) == 1

    def prob(self, token_id: int) -> float:
        """Probability of one token."""
        i = int(np.searchsorted(self.token_ids, token_id))
        found = i < len(self.token_ids) and self.token_ids[i] == token_id
        return float(self.probs[i]) if found else 0.0

    def sample(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative distribution."""
        if self.is_one_hot:
            return int(self.token_ids[0])
        cumulative = np.cumsum(self.probs)
        i = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.token_ids[min(i, len(self.probs) - 1)])

    def without(self, token_id: int) -> "Distribution | None":
        """What is left to draw from once `token_id` is drawn; None where that is nothing."""
        keep = self.token_ids != token_id
        left = self.probs[keep]
        total = left.sum()
        return Distribution(self.token_ids[keep], left / total) if total > 0 else None

    def residual(self, other: "Distribution") -> "Distribution":
        """`max(self - other, 0)`, normalised: what is left to draw from after a rejection.

        Equal distributions leave nothing; rejection then has probability 0, and self is returned.
        """
        positions = np.searchsorted(other.token_ids, self.token_ids)
        positions = np.minimum(positions, len(other.token_ids) - 1)
        shared = other.token_ids[positions] == self.token_ids
        left = np.maximum(self.probs - np.where(shared, other.probs[positions], 0.0), 0.0)
        total = left.sum()
        if total <= 0.0:
            return self
        keep = left > 0
        return Distribution(self.token_ids[keep], left[keep] / total)


def to_distribution(logits: NDArray[np.float32], params: SamplingParams) -> Distribution:
    """What `params` make of one row of logits [V]: temperature, then top-k, then top-p.

    Ties at the top-k limit are all kept, as transformers does. Raises `EngineError` on NaN.
    """
    best = int(np.argmax(logits))  # the first NaN, if there is one
    if not np.isfinite(logits[best]):
        raise EngineError(
            f"The model gave a logit that is {logits[best]}. Its weights are damaged, or overflow "
            "in their precision: run `specexport validate`, or build with --weights fp32."
        )
    if params.temperature == 0.0:
        return Distribution.one_hot(best)
    token_ids = _top_k(logits, params.top_k)
    scores = logits[token_ids].astype(np.float64)
    weights = np.exp((scores - float(logits[best])) / params.temperature)
    probs = weights / weights.sum()
    if params.top_p < 1.0:
        kept = _top_p(probs, params.top_p)
        token_ids, probs = token_ids[kept], probs[kept] / probs[kept].sum()
    return Distribution(token_ids, probs)


def _top_k(logits: NDArray[np.float32], top_k: int) -> NDArray[np.int64]:
    """Ids of all tokens at least as likely as the k-th."""
    if not 0 < top_k < len(logits):
        return np.arange(len(logits))
    limit = np.partition(logits, -top_k)[-top_k]
    return np.flatnonzero(logits >= limit)


def _top_p(probs: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the likeliest tokens until they reach `top_p`, ascending; equals go by index."""
    num_candidates = min(_FIRST_CANDIDATES, len(probs))
    while True:  # rarely needs more than the first round: no full sort of the vocabulary
        limit = np.partition(probs, -num_candidates)[-num_candidates]
        candidates = np.flatnonzero(probs >= limit)
        order = candidates[np.argsort(-probs[candidates], kind="stable")]
        before = np.cumsum(probs[order]) - probs[order]
        if before[-1] >= top_p or len(order) == len(probs):
            return np.sort(order[before < top_p])
        num_candidates = min(num_candidates * 8, len(probs))
