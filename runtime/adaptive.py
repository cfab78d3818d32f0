"""Draft sizes that give the most tokens a second.

A drafted token costs a little more of the target's step and, from a model, a step of the drafter;
it pays by the probability that it is accepted. Both are estimated while running; a draft of length
0, plain decoding, is a choice like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specexport.runtime.acceptance import Acceptance
from specexport.runtime.costs import LiveCosts, StepCosts
from specexport.runtime.lengths import DraftSize, Outcome, RowState

_PROBE_SHARE = 0.015
"""Of the time spent on plain steps, what may go into seeing whether drafting pays again."""
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
        depth = max((row.max_depth for row in rows), default=0)
        shapes = [shape for shape in self._shapes if shape.depth <= depth]
        if not shapes:
            return [DraftSize(0)] * len(rows)
        step = _Step(self, [row for row in rows if row.is_whole])
        plain_s, best = step.seconds(None), None
        most = step.num_rows / plain_s
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
        """`rows` are the whole ones."""
        narrow = [row for row in rows if row.num_pending <= _NARROW] or rows
        self._lengths, self._rows = lengths, narrow
        self.num_rows = len(narrow)
        self._width = max(row.num_pending for row in narrow)
        self._longest = max(row.num_tokens for row in narrow)
        self._drafting = [row for row in narrow if row.max_depth]

    def tokens(self, shape: DraftShape) -> float:
        """Expected output of all rows together."""
        acceptance, depth = self._lengths.acceptance, shape.depth
        drafted = sum(
            acceptance.expected(row.request_id, shape.width)[min(depth, row.max_depth)]
            for row in self._drafting
        )
        return drafted + self.num_rows - len(self._drafting)

    def seconds(self, shape: DraftShape | None) -> float:
        """Of the target's call and of drafting; None is no draft at all."""
        num_nodes = shape.num_nodes if shape else 0
        num_tokens, longest = self.num_rows * (self._width + num_nodes), self._longest + num_nodes
        seconds = self._lengths.target.step_s(self.num_rows, num_tokens, longest)
        if shape:
            seconds += sum(self._drafter_s(width) for width in shape.widths)
        return max(seconds, 1e-9)

    @property
    def level_s(self) -> float:
        """Of the drafter, for one row more in a step of it."""
        num_rows = len(self._drafting)
        return max(self._drafter_s(1) - self._drafter_s((num_rows - 1) / max(num_rows, 1)), 0.0)

    @property
    def catching_up_s(self) -> float:
        """Of the drafter, for the texts that it has not read yet."""
        return self._drafter_s(sum(row.num_behind for row in self._drafting) / self.num_rows)

    def _drafter_s(self, width: float) -> float:
        drafter = self._lengths.drafter
        if drafter is None or not width:
            return 0.0
        num_rows = len(self._drafting)
        seconds = drafter.step_s(num_rows, round(num_rows * width), self._longest)
        return seconds * self._lengths.target.load
