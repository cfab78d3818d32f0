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
_BLOCK = 32


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
    """What the sampling options of `params` make of one row of logits [V].

    Temperature, then top-k, top-p, min-p and typical-p, each on what the one before it left, as
    in transformers. Ties at the limit of top-k, min-p and typical-p are all kept. A logit of -inf
    rules its token out. Raises `EngineError` on NaN, and where no token is left.
    """
    best = _best(logits)
    if params.temperature == 0.0:
        return Distribution.one_hot(best)
    token_ids = _top_k(logits, params.top_k)
    scores = logits[token_ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a temperature near 0 leaves the best token alone
        weights = np.exp((scores - float(logits[best])) / params.temperature)
    probs = weights / weights.sum()
    for keep, limit, keeps_all in (
        (_top_p, params.top_p, 1.0),
        (_min_p, params.min_p, 0.0),
        (_typical_p, params.typical_p, 1.0),
    ):
        if limit != keeps_all:
            kept = keep(probs, limit)
            token_ids, probs = token_ids[kept], probs[kept] / probs[kept].sum()
    return Distribution(token_ids, probs)


def _best(logits: NDArray[np.float32]) -> int:
    best = int(np.argmax(logits))  # the first NaN, if there is one
    if logits[best] == -np.inf:
        raise EngineError(
            "No token is left to come: the model's logits and what the request rules out leave "
            "none. Allow more tokens, or lower min_tokens."
        )
    if not np.isfinite(logits[best]):
        raise EngineError(
            f"The model gave a logit that is {logits[best]}. Its weights are damaged, or overflow "
            "in their precision: run `specexport validate`, or build with --weights fp32."
        )
    return best


def _top_k(logits: NDArray[np.float32], top_k: int) -> NDArray[np.int64]:
    """Ids of all possible tokens at least as likely as the k-th."""
    if not 0 < top_k < len(logits):
        return np.flatnonzero(logits > -np.inf)
    found = largest(logits, top_k)
    return found[logits[found] > -np.inf]


def _top_p(probs: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the likeliest tokens until they reach `top_p`, ascending; equals go by index."""
    return np.sort(_leading(probs, probs, top_p))


def _min_p(probs: NDArray[np.float64], min_p: float) -> NDArray[np.int64]:
    """Indices of the tokens whose probability is at least `min_p` times the largest."""
    return np.flatnonzero(probs >= min_p * probs.max())


def _typical_p(probs: NDArray[np.float64], typical_p: float) -> NDArray[np.int64]:
    """Indices of locally typical tokens (arXiv 2202.00666): surprise nearest to the entropy."""
    surprise = -np.log(np.maximum(probs, np.finfo(np.float64).tiny))
    distance = np.abs(surprise - (probs * surprise).sum())
    last = _leading(-distance, probs, typical_p)[-1]
    return np.flatnonzero(distance <= distance[last])


def _leading(
    scores: NDArray[np.float64], probs: NDArray[np.float64], mass: float
) -> NDArray[np.int64]:
    """The fewest indices of largest score, best first, whose probabilities reach `mass`."""
    num_candidates = _FIRST_CANDIDATES
    while True:  # rarely needs more than the first round: no full sort of the vocabulary
        candidates = largest(scores, num_candidates)
        order = candidates[np.argsort(-scores[candidates], kind="stable")]
        before = np.cumsum(probs[order]) - probs[order]
        if before[-1] >= mass or len(order) == len(probs):
            return order[before < mass]
        num_candidates *= 8


def largest(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Indices of all values at least as large as the `count`-th largest, ascending."""
    if count >= len(values):
        return np.arange(len(values))
    width = len(values) // _BLOCK
    if width > 2 * count:  # the count-th largest of the columns' maxima bounds it from below
        maxima = values[: width * _BLOCK].reshape(_BLOCK, width).max(axis=0)
        candidates = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
    else:
        candidates = np.arange(len(values))
    found = values[candidates]
    kept: NDArray[np.int64] = candidates[found >= np.partition(found, -count)[-count]]
    return kept


def top_ids(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, best first; equals go by index, NaN counts as -inf."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    if np.isnan(values.max()):
        values = np.where(np.isnan(values), -np.inf, values)
    candidates = largest(values, count)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]
