"""What a step costs: a table that was measured, corrected while running."""

import math
from bisect import bisect_left
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_LOAD_WEIGHT, _SIZE_WEIGHT = 0.1, 0.05
"""Of the newest step."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StepSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class StepCosts(BaseModel):
    """Seconds of one graph's step, by its rows, its query tokens and their context.

    Apart from attention, a step of B rows costs what B·Q tokens of one row cost; attention reads
    each row's context once, and computes with every query token's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_tokens: tuple[Annotated[int, Field(gt=0)], ...]  # ascending
    seconds: tuple[StepSeconds, ...]  # none smaller than the one before it
    row_context_s: Seconds
    """For each token that a row looks at."""
    pair_s: Seconds
    """For each token that a query token looks at."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.num_tokens) != len(self.seconds) or not self.num_tokens:
            raise ValueError("num_tokens and seconds must be lists of the same length")
        if list(self.num_tokens) != sorted(set(self.num_tokens)):
            raise ValueError("num_tokens must ascend")
        if list(self.seconds) != sorted(self.seconds):
            raise ValueError("seconds must not descend: more tokens never take less time")
        return self

    def step_s(self, num_rows: int, num_tokens: int, longest: int) -> float:
        """A step of so many rows and query tokens in all, where the longest text is so long."""
        context_s = (self.row_context_s * num_rows + self.pair_s * num_tokens) * longest
        return self._tokens_s(num_tokens) + context_s

    def _tokens_s(self, num_tokens: int) -> float:
        """Between measured points and past the last one on straight lines."""
        known = self.num_tokens
        if len(known) == 1:
            return self.seconds[0] * num_tokens / known[0]
        i = min(max(bisect_left(known, num_tokens), 1), len(known) - 1)
        (n0, n1), (s0, s1) = known[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return max(s0 + (s1 - s0) * (num_tokens - n0) / (n1 - n0), 0.0)


class LiveCosts:
    """A table, corrected by what steps really take: for the machine's load, and size by size."""

    def __init__(self, table: StepCosts) -> None:
        self._table = table
        self.load = 1.0
        """How much longer steps of all sizes take now."""
        self._sizes: dict[int, float] = {}

    def step_s(self, num_rows: int, num_tokens: int, longest: int) -> float:
        """As the table's, corrected."""
        factor = self._sizes.get(_size(num_tokens), 1.0) * self.load
        return self._table.step_s(num_rows, num_tokens, longest) * factor

    def observe(self, num_rows: int, num_tokens: int, longest: int, seconds: float) -> None:
        """Take in one step; a single outlier counts for little, a time that is none for nothing."""
        predicted = self._table.step_s(num_rows, num_tokens, longest)
        if predicted <= 0 or not 0 < seconds < math.inf:
            return
        size = _size(num_tokens)
        factor = self._sizes.get(size, 1.0)
        ratio = min(seconds / predicted, 2 * factor * self.load)
        self.load += _LOAD_WEIGHT * (ratio / factor - self.load)
        self._sizes[size] = factor + _SIZE_WEIGHT * (ratio / self.load - factor)


def _size(num_tokens: int) -> int:
    """Sizes that are corrected together: two for each doubling."""
    return int(2 * math.log2(max(num_tokens, 1)))
