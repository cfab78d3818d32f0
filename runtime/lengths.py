"""How long drafts should be: a fixed number, or what gives the most tokens a second.

A drafted token costs a little more of the target's step and, from a model, a step of the drafter;
it pays by the probability that it is accepted. Both are estimated while running; a draft of length
0, plain decoding, is a choice like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specexport.runtime.costs import Corrections, StepCosts

_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 2.0
_MEMORY = 24.0
"""Drafts that an acceptance estimate remembers, about."""
_PROBE_LENGTH = 3
_PROBE_SHARE = 0.015
"""Of the time spent on plain steps, what may go into seeing whether drafting pays again."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a draft of one length, or a tree of one depth, consists of."""

    num_nodes: int
    widths: tuple[int, ...]
    """Query tokens of each step of the drafter."""

    @classmethod
    def chain(cls, length: int) -> "DraftShape":
        """A token a step."""
        return cls(length, (1,) * length)


@dataclass(frozen=True, slots=True)
class RowState:
    """A running request as it stands before a step."""

    request_id: int
    num_tokens: int
    """Tokens of its text."""
    num_pending: int
    """Of these, what this step will compute."""
    max_draft: int
    """The longest draft that it may have; 0 while its prompt is computed."""


class DraftLengths(Protocol):
    """Decides how long each row's draft may be."""

    def choose(self, rows: Sequence[RowState]) -> list[int]:
        """A length for each row, at most its `max_draft`."""
        ...

    def observe(self, request_id: int, num_proposed: int, num_accepted: int) -> None:
        """How a draft fared."""
        ...

    def observe_step(self, num_rows: int, width: int, longest: int, seconds: float) -> None:
        """What a step of the target took."""
        ...

    def release(self, request_id: int) -> None:
        """The request ended."""
        ...


@dataclass(slots=True)
class FixedLength:
    """Always the same length."""

    length: int

    def choose(self, rows: Sequence[RowState]) -> list[int]:
        """The length, where a row may have it."""
        return [min(self.length, row.max_draft) for row in rows]

    def observe(self, request_id: int, num_proposed: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def observe_step(self, num_rows: int, width: int, longest: int, seconds: float) -> None:
        """Nothing to learn."""

    def release(self, request_id: int) -> None:
        """Nothing to forget."""


@dataclass(slots=True)
class _Acceptance:
    """P(token i is accepted | those before it were), by position; old drafts fade."""

    proposed: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def record(self, num_proposed: int, num_accepted: int) -> None:
        tried = min(num_accepted + 1, num_proposed)  # what follows a rejection was not tried
        missing = tried - len(self.proposed)
        self.proposed.extend([0.0] * missing)
        self.accepted.extend([0.0] * missing)
        fade = 1 - 1 / _MEMORY
        for i in range(tried):
            self.proposed[i] = self.proposed[i] * fade + 1
            self.accepted[i] = self.accepted[i] * fade + (i < num_accepted)

    def rate(self, i: int, prior: float) -> float:
        if i >= len(self.proposed):
            return prior
        return (self.accepted[i] + _PRIOR_WEIGHT * prior) / (self.proposed[i] + _PRIOR_WEIGHT)


class AdaptiveLength:
    """The one length of a batch that promises the most tokens a second.

    All rows share it: a shorter draft beside a longer one would cost the same, as padding.
    """

    def __init__(
        self, target: StepCosts, drafter: StepCosts | None, shapes: Sequence[DraftShape]
    ) -> None:
        """`shapes[length]` is what a draft of that length consists of, up to the longest.

        Without `drafter`, drafting costs next to nothing.
        """
        self._target, self._drafter = target, drafter
        self._shapes = shapes
        self._corrections = Corrections()
        self._all = _Acceptance()
        self._requests: dict[int, _Acceptance] = {}
        self._saved_for_probe = 0.0  # in plain steps

    def choose(self, rows: Sequence[RowState]) -> list[int]:
        """The best length for each row that may have a draft."""
        longest = min(max(row.max_draft for row in rows), len(self._shapes) - 1)
        if longest == 0:
            return [0] * len(rows)
        best = max(range(longest + 1), key=lambda length: self._tokens_per_s(rows, length))
        if best == 0:
            best = self._probe(rows, min(_PROBE_LENGTH, longest))
        return [min(best, row.max_draft) for row in rows]

    def observe(self, request_id: int, num_proposed: int, num_accepted: int) -> None:
        """Take in how a draft fared, for its request and for all."""
        if num_proposed:
            self._all.record(num_proposed, num_accepted)
            self._request(request_id).record(num_proposed, num_accepted)

    def observe_step(self, num_rows: int, width: int, longest: int, seconds: float) -> None:
        """Correct the table."""
        num_tokens = num_rows * width
        predicted = self._target.step_s(num_tokens, num_tokens * longest)
        self._corrections.observe(num_tokens, predicted, seconds)

    def release(self, request_id: int) -> None:
        """Forget the request; what it taught about all stays."""
        self._requests.pop(request_id, None)

    def _tokens_per_s(self, rows: Sequence[RowState], length: int) -> float:
        tokens = sum(self._expected(row, min(length, row.max_draft)) for row in rows)
        return tokens / self._seconds(rows, length)

    def _seconds(self, rows: Sequence[RowState], length: int) -> float:
        """Of the step, its drafting included, with drafts of `length` where rows may have them."""
        drafts = [min(length, row.max_draft) for row in rows]
        nodes = [self._shapes[draft].num_nodes for draft in drafts]
        width = max(row.num_pending + n for row, n in zip(rows, nodes, strict=True))
        longest = max(row.num_tokens + n for row, n in zip(rows, nodes, strict=True))
        num_tokens = len(rows) * width
        seconds = self._target.step_s(num_tokens, num_tokens * longest)
        seconds *= self._corrections.ratio(num_tokens)
        seconds += self._drafting_s(sum(draft > 0 for draft in drafts), longest, length)
        return max(seconds, 1e-9)

    def _drafting_s(self, num_rows: int, longest: int, length: int) -> float:
        if self._drafter is None or num_rows == 0:
            return 0.0
        levels = [num_rows * width for width in self._shapes[length].widths]
        seconds = sum(self._drafter.step_s(n, n * longest) for n in levels)
        return seconds * self._corrections.typical

    def _expected(self, row: RowState, draft: int) -> float:
        """Tokens that the step gives this row, the target's own included."""
        if row.max_draft == 0:
            return 0.0  # its prompt goes on whatever the others do
        own = self._request(row.request_id)
        reached, total, prior = 1.0, 1.0, _PRIOR_ACCEPTANCE
        for i in range(draft):
            prior = self._all.rate(i, prior)
            reached *= own.rate(i, prior)
            total += reached
        return total

    def _request(self, request_id: int) -> _Acceptance:
        return self._requests.setdefault(request_id, _Acceptance())

    def _probe(self, rows: Sequence[RowState], length: int) -> int:
        """Now and then a short draft, once enough has been saved for what it costs."""
        price = self._seconds(rows, length) / self._seconds(rows, 0) - 1
        self._saved_for_probe += _PROBE_SHARE
        if self._saved_for_probe < price:
            return 0
        self._saved_for_probe = 0.0
        return length
