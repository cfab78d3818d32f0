"""Which tokens a draft tries at a place, of what its drafter's logits make possible there."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.distribution import Distribution
from specexport.runtime.params import SamplingParams
from specexport.runtime.race import draw
from specexport.runtime.random import Purpose, uniform
from specexport.runtime.token_map import TokenMap

Logits = NDArray[np.float32]  # [V_draft]
Pick = tuple[int, Distribution]
"""A token of the target's vocabulary, and what it was drawn from."""


class Picker(Protocol):
    """Of one request."""

    token_map: TokenMap

    def pick(
        self, logits: Logits, ranks: Sequence[int], position: int, number: int
    ) -> Iterator[Pick]:
        """One different token for each rank, or fewer where there are no more.

        They would stand at `position` of the text; the first is node `number` of the draft.
        """
        ...


class Likeliest:
    """The likeliest tokens, for certain: rank 0 is the best."""

    def __init__(self, token_map: TokenMap) -> None:
        self.token_map = token_map

    def pick(
        self, logits: Logits, ranks: Sequence[int], position: int, number: int
    ) -> Iterator[Pick]:
        """Those of the ranks."""
        best = self.token_map.top(logits, max(ranks) + 1)
        for rank in ranks:
            if rank < len(best):
                token_id = self.token_map.to_target(best[rank])
                yield token_id, Distribution.one_hot(token_id)


class Drawn:
    """Drawn at random without replacement: for rejection sampling."""

    def __init__(self, params: SamplingParams, token_map: TokenMap) -> None:
        self._params, self.token_map = params, token_map

    def pick(
        self, logits: Logits, ranks: Sequence[int], position: int, number: int
    ) -> Iterator[Pick]:
        """As many as there are ranks, with what each was drawn from."""
        left = self.token_map.distribution(logits, self._params)
        for index in range(len(ranks)):
            if left is None:
                return
            chance = uniform(self._params.seed, position, Purpose.DRAFT, number + index)
            token_id = left.sample(chance)
            yield token_id, left
            left = left.without(token_id)


class Raced:
    """Those that the target would draw, if its distribution were the drafter's; certain."""

    def __init__(self, params: SamplingParams, token_map: TokenMap) -> None:
        self._params, self.token_map = params, token_map

    def pick(
        self, logits: Logits, ranks: Sequence[int], position: int, number: int
    ) -> Iterator[Pick]:
        """As many as there are ranks: the winner, then who wins without it, and so on."""
        left = self.token_map.distribution(logits, self._params)
        for _ in ranks:
            if left is None:
                return
            token_id = draw(left, self._params.seed, position)
            yield token_id, Distribution.one_hot(token_id)
            left = left.without(token_id)


MakePicker = Callable[[SamplingParams, TokenMap], Picker]


def drawn(params: SamplingParams, token_map: TokenMap) -> Picker:
    """Drafts at random for sampled requests: the most is accepted."""
    return Drawn(params, token_map) if params.temperature else Likeliest(token_map)


def raced(params: SamplingParams, token_map: TokenMap) -> Picker:
    """Certain drafts for all requests: how large they are cannot change a seeded output."""
    return Raced(params, token_map) if params.temperature else Likeliest(token_map)
