"""Draft sizes that give the most tokens a second.

A drafted token costs a little more of the target's step and, from a model, a step of the drafter;
it pays by the probability that it is accepted. Both are estimated while running; a draft of length
0, plain decoding, is a choice like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from specexport.runtime.acceptance import Acceptance
from specexport.runtime.costs import LiveCosts, StepCosts
from specexport.runtime.lengths import DraftSize, Outcome, RowState

_PROBE_SHARE = 0.015
"""Of the time spent on plain steps, what may go into seeing whether drafting pays again."""
_LEAST_GAIN = 1.02
"""By which a draft must promise more than none: of many estimates the best is too good."""
_NARROW = 32
"""Query tokens; rows of more run in a call of their own, with drafts or without."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a draft of one size consists of."""

    depth: int
    num_nodes: int
    widths: tuple[int, ...] = ()
    """Query tokens of each step of the drafter."""
    width: int = 1
    """Children of a node at the most."""

    @classmethod
    def chain(cls, length: int) -> "DraftShape":
        """A token a step."""
        return cls(length, length, (1,) * length)


class AdaptiveLength:
    """The one shape for a batch that promises the most tokens a second.

    All rows share it: a smaller draft beside a larger one would cost the target the same, as
    padding. Where the drafter's own time counts, a row's draft ends where it stops paying.
    """

    def __init__(
        self, target: StepCosts, drafter: StepCosts | None, shapes: Sequence[DraftShape]
    ) -> None:
        """`shapes` are those to choose from, besides no draft at all.

        Without `drafter`, drafting costs next to nothing.
        """
        self.target = LiveCosts(target)
        self.drafter = drafter
        self._shapes = [shape for shape in shapes if shape.depth]
        self.acceptance = Acceptance(max((shape.depth for shape in shapes), default=0))
        self._saved_s = 0.0

    def choose(self, rows: Sequence[RowState]) -> list[DraftSize]:
        """The best shape for each row that may have a draft."""
        together = _together(rows)
        depth = max((row.max_depth for row in together), default=0)
        shapes = [shape for shape in self._shapes if shape.depth <= depth]
        if not shapes:
            return [DraftSize(0)] * len(rows)
        step = _Step(self, together)
        plain_s, best = step.seconds(None), None
        most = _LEAST_GAIN * step.num_rows / plain_s
        for shape in shapes:
            if (speed := step.tokens(shape) / step.seconds(shape)) > most:
                best, most = shape, speed
        if best is None:
            best = self._probe(step, shapes, plain_s)
        return self._sizes(rows, step, best, most)

    def observe(self, request_id: int, outcome: Outcome) -> None:
        """Take in how a draft fared, for its request and for all."""
        self.acceptance.record(request_id, outcome)

    def observe_step(self, num_rows: int, width: int, longest: int, seconds: float) -> None:
        """Correct the table."""
        self.target.observe(num_rows, num_rows * width, longest, seconds)

    def release(self, request_id: int) -> None:
        """Forget the request; what it taught about all stays."""
        self.acceptance.release(request_id)

    def _probe(
        self, step: "_Step", shapes: Sequence[DraftShape], plain_s: float
    ) -> DraftShape | None:
        """Now and then the best draft all the same, once enough was saved for what it costs."""
        found = max(shapes, key=lambda shape: step.tokens(shape) / step.seconds(shape))
        self._saved_s += _PROBE_SHARE * plain_s
        if self._saved_s < step.seconds(found) + step.catching_up_s - plain_s:
            return None
        self._saved_s = 0.0
        return found

    def _sizes(
        self, rows: Sequence[RowState], step: "_Step", shape: DraftShape | None, speed: float
    ) -> list[DraftSize]:
        """Each row's part of the shape; none is left out, or it would not be seen to recover."""
        if shape is None:
            return [DraftSize(0)] * len(rows)
        least_gain = speed * step.level_s
        sizes = []
        for row in rows:
            depth = min(shape.depth, row.max_depth)
            expected = self.acceptance.expected(row.request_id, shape.width)
            while depth > 1 and expected[depth] - expected[depth - 1] < least_gain:
                depth -= 1
            sizes.append(DraftSize(depth, shape.width))
        return sizes


class _Step:
    """What a step would cost and give, by the shape of its drafts."""

    def __init__(self, lengths: AdaptiveLength, rows: Sequence[RowState]) -> None:
        """`rows` run in one call."""
        self._lengths, self._rows = lengths, rows
        self.num_rows = len(rows)
        self._width = max(row.num_pending for row in rows)
        self._longest = max(row.num_tokens for row in rows)
        self._drafting = [row for row in rows if row.max_depth]
        self._tokens: dict[int, list[float]] = {}  # by width, then by depth
        self._drafter_s = cache(self._drafter_step_s)

    def tokens(self, shape: DraftShape) -> float:
        """Expected output of all rows together."""
        if shape.width not in self._tokens:
            self._tokens[shape.width] = self._tokens_by_depth(shape.width)
        return self._tokens[shape.width][shape.depth]

    def _tokens_by_depth(self, width: int) -> list[float]:
        acceptance = self._lengths.acceptance
        limits = [(row.max_depth, acceptance.expected(row.request_id, width)) for row in self._rows]
        depths = range(max(most for most, _ in limits) + 1)
        return [sum(expected[min(depth, most)] for most, expected in limits) for depth in depths]

    def seconds(self, shape: DraftShape | None) -> float:
        """Of the target's call and of drafting; None is no draft at all."""
        num_nodes = shape.num_nodes if shape else 0
        num_tokens, longest = self.num_rows * (self._width + num_nodes), self._longest + num_nodes
        seconds = self._lengths.target.step_s(self.num_rows, num_tokens, longest)
        if shape and self._lengths.drafter is not None:
            seconds += sum(map(self._drafter_s, shape.widths))
        return max(seconds, 1e-9)

    @property
    def level_s(self) -> float:
        """Of the drafter, for one row more in a step of it."""
        num_rows = len(self._drafting)
        return max(self._drafter_s(1) - self._drafter_s((num_rows - 1) / max(num_rows, 1)), 0.0)

    @property
    def catching_up_s(self) -> float:
        """Of the drafter, for the texts that it has not read yet."""
        num_behind = sum(row.num_behind for row in self._drafting)
        return self._drafter_s(num_behind / max(len(self._drafting), 1))

    def _drafter_step_s(self, width: float) -> float:
        drafter = self._lengths.drafter
        if drafter is None or not width:
            return 0.0
        num_rows = len(self._drafting)
        seconds = drafter.step_s(num_rows, round(num_rows * width), self._longest)
        return seconds * self._lengths.target.load


def _together(rows: Sequence[RowState]) -> list[RowState]:
    """The rows of which drafts are decided: those that share a call, else ends of prompts."""
    narrow = [row for row in rows if row.is_whole and row.num_pending <= _NARROW]
    if any(row.max_depth for row in narrow):
        return narrow
    return [row for row in rows if row.max_depth]
