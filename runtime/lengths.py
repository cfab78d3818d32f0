"""How long drafts are, and how wide: decided anew for each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ANY_WIDTH = 1 << 30
"""A draft as wide as its drafter makes it."""


@dataclass(frozen=True, slots=True)
class DraftSize:
    """The most that a draft may be."""

    depth: int
    width: int = ANY_WIDTH
    """Children of a node; 1 makes a chain."""


@dataclass(frozen=True, slots=True)
class RowState:
    """A request's row as it stands before a step."""

    request_id: int
    num_tokens: int
    """Tokens of its text that are computed once the step is done."""
    num_pending: int
    """Of these, what this step computes."""
    is_whole: bool
    """True where the text is computed to its end, so that the target's own token follows."""
    max_depth: int
    """Of its draft; 0 where it can have none."""
    num_behind: int = 0
    """Tokens that the drafter must read before it can draft."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a draft fared."""

    depth: int
    num_accepted: int
    is_tree: bool = False
    num_first: int | None = None
    """Accepted tokens that a chain would have had too: first children. None: all of them."""


class DraftLengths(Protocol):
    """Decides how large each row's draft may be."""

    def choose(self, rows: Sequence[RowState]) -> list[DraftSize]:
        """A size for each row, no deeper than its `max_depth`."""
        ...

    def observe(self, request_id: int, outcome: Outcome) -> None:
        """How a draft fared."""
        ...

    def observe_step(self, num_rows: int, width: int, longest: int, seconds: float) -> None:
        """What a call of the target took; its rows were `width` wide, their texts `longest`."""
        ...

    def release(self, request_id: int) -> None:
        """The request ended."""
        ...


@dataclass(slots=True)
class FixedLength:
    """Always the same length."""

    length: int

    def choose(self, rows: Sequence[RowState]) -> list[DraftSize]:
        """The length, where a row may have it."""
        return [DraftSize(min(self.length, row.max_depth)) for row in rows]

    def observe(self, request_id: int, outcome: Outcome) -> None:
        """Nothing to learn."""

    def observe_step(self, num_rows: int, width: int, longest: int, seconds: float) -> None:
        """Nothing to learn."""

    def release(self, request_id: int) -> None:
        """Nothing to forget."""
