"""What a step costs: a table that was measured, corrected while running."""

import math
from bisect import bisect_left
from dataclasses import dataclass
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
        self._num_seen = 0
        self._sizes: dict[int, _Size] = {}

    def step_s(self, num_rows: int, num_tokens: int, longest: int) -> float:
        """As the table's, corrected."""
        size = self._sizes.get(_bucket(num_tokens))
        factor = self.load * (size.factor if size else 1.0)
        return self._table.step_s(num_rows, num_tokens, longest) * factor

    def observe(self, num_rows: int, num_tokens: int, longest: int, seconds: float) -> None:
        """Take in one step; a single outlier counts for little, a time that is none for nothing."""
        predicted = self._table.step_s(num_rows, num_tokens, longest)
        if predicted <= 0 or not 0 < seconds < math.inf:
            return
        size = self._sizes.setdefault(_bucket(num_tokens), _Size())
        ratio = min(seconds / predicted, 2 * size.factor * self.load)
        self._num_seen += 1
        self.load += _weight(self._num_seen, _LOAD_WEIGHT) * (ratio / size.factor - self.load)
        size.num_seen += 1
        weight = _weight(size.num_seen, _SIZE_WEIGHT)
        size.factor += weight * (ratio / self.load - size.factor)


@dataclass(slots=True)
class _Size:
    factor: float = 1.0
    num_seen: int = 0


def _weight(num_seen: int, least: float) -> float:
    """Of the newest of so many: the first ones count as in a mean, beside what the table says."""
    return max(1 / (num_seen + 1), least)


def _bucket(num_tokens: int) -> int:
    """Sizes that are corrected together: two for each doubling."""
    return int(2 * math.log2(max(num_tokens, 1)))
