"""Log-probabilities of tokens, natural logarithms."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.distribution import to_distribution, top_ids
from specexport.runtime.processing import LogitsProcessor

Logits = NDArray[np.float32]  # [V]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability; -inf where it cannot come."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the token at one position, and of the likeliest ones there, best first."""

    token_id: int
    logprob: float
    top: tuple[Logprob, ...] = ()


def raw_logprobs(logits: Logits, token_id: int, num_top: int) -> TokenLogprobs:
    """By the model's own distribution."""
    best = float(logits.max())
    # Single precision is enough for each term; their sum is not short.
    total = best + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))

    def logprob(i: int) -> float:
        return float(logits[i]) - total

    top = tuple(Logprob(i, logprob(i)) for i in top_ids(logits, num_top).tolist())
    return TokenLogprobs(token_id, logprob(token_id), top)


def processed_logprobs(
    processor: LogitsProcessor, logits: Logits, path: Sequence[int], token_id: int
) -> TokenLogprobs:
    """By what the request's options make of the logits; temperature 0 counts as 1 here.

    Tokens that cannot come are not among the likeliest, which may be fewer than asked for.
    """
    params = processor.params
    if params.temperature == 0:  # one token would have it all
        params = replace(params, temperature=1.0)
    found = to_distribution(processor.scores(logits, path), params)
    with np.errstate(divide="ignore"):
        logprobs = np.log(found.probs)
        own = float(np.log(found.prob(token_id)))
    top = top_ids(logprobs, params.top_logprobs)
    likeliest = tuple(Logprob(int(found.token_ids[i]), float(logprobs[i])) for i in top)
    return TokenLogprobs(token_id, own, likeliest)
