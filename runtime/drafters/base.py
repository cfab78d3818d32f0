"""What a drafter is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specexport.runtime.distribution import Distribution
from specexport.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuation: `probs[i]` is what `token_ids[i]` was drawn from.

    A deterministic drafter's `probs` are one-hot.
    """

    token_ids: tuple[int, ...] = ()  # [K]
    probs: tuple[Distribution, ...] = ()  # [K]

    @classmethod
    def certain(cls, token_ids: Sequence[int]) -> "Draft":
        """A draft that was not drawn at random."""
        return cls(tuple(token_ids), tuple(Distribution.one_hot(t) for t in token_ids))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that is ready for a draft, and how many tokens it may have."""

    request: Request
    max_tokens: int


class Drafter(Protocol):
    """Proposes drafts in the target's vocabulary and keeps its own state per request.

    A request's row in the drafter is its `slot`, as everywhere.
    """

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """One draft, possibly empty, for each; none longer than its `max_tokens`."""
        ...

    def observe(self, request: Request) -> None:
        """After verification: all but the last of the request's tokens stand as computed."""
        ...

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """The request in slot `source` moves to `destination`; the target had `length` computed."""
        ...

    def release(self, request: Request) -> None:
        """The request ended; forget it."""
        ...

    @property
    def engine_time_s(self) -> float:
        """Seconds spent inside an inference library so far; 0 without one."""
        ...

    def close(self) -> None:
        """Free what the drafter holds."""
        ...


class NoDrafter:
    """Plain decoding: every draft is empty. Also the base of drafters that hold no engine."""

    engine_time_s = 0.0

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """An empty draft for each."""
        return [Draft()] * len(wanted)

    def observe(self, request: Request) -> None:
        """Nothing to keep."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Nothing to move."""

    def release(self, request: Request) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to free."""
