"""What a drafter is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.draft import Draft
from specexport.runtime.lengths import ANY_WIDTH
from specexport.runtime.prefix_cache import Piece
from specexport.runtime.request import Request


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A running request and how large a draft it may have."""

    request: Request
    max_tokens: int
    """Its depth; 0 where none is wanted in this step."""
    max_width: int = ANY_WIDTH
    """Children of a node; 1 makes a chain of a tree."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step computed of a request: its prompt's next tokens, accepted tokens, or both."""

    path: tuple[int, ...] = ()
    """The accepted nodes of its draft."""
    hidden_states: NDArray[np.float32] | None = None  # [m, W]
    """The target's taps at the m tokens that are computed now; None where it has none."""


class Drafter(Protocol):
    """Proposes drafts in the target's vocabulary and keeps its own state per request.

    A request's row in the drafter is its `slot`, as everywhere.
    """

    @property
    def is_free(self) -> bool:
        """True where drafts cost next to nothing: they are cut to size once they are seen."""
        ...

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """One draft, possibly empty, for each; none deeper than its `max_tokens`.

        All running requests are there in every step, so that a drafter can keep up with a prompt
        that is still being computed.
        """
        ...

    def observe(self, request: Request, progress: Progress) -> None:
        """After a step: the first `request.num_computed` tokens stand as computed."""
        ...

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """The request in slot `source` moves to `destination`; the target had `length` computed."""
        ...

    def release(self, request: Request) -> None:
        """The request ended; forget it."""
        ...

    def num_behind(self, request: Request) -> int:
        """Tokens that it must read before it can draft for the request."""
        ...

    def num_reusable(self, request: Request) -> int:
        """First tokens of its text whose entries `save` can give, of those that are computed."""
        ...

    def save(self, request: Request, start: int, stop: int) -> NDArray[np.float32] | None:
        """What its cache holds for tokens [start, stop) of the text; None where it can do without.

        A whole text is saved in pieces, one after the other from the first token on.
        """
        ...

    def restore(self, request: Request, pieces: Sequence[Piece], limit: int) -> int:
        """Take back what was saved of a text that begins as this new request's.

        Returns how many tokens, at most `limit`, the target may count as computed too.
        """
        ...

    def pause(self, request: Request) -> None:
        """The request loses its slot, and with it all that is computed; it will go on later."""
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

    @property
    def is_free(self) -> bool:
        """Nothing costs nothing."""
        return True

    @property
    def engine_time_s(self) -> float:
        """Nothing is run."""
        return 0.0

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """An empty draft for each."""
        return [Draft()] * len(wanted)

    def observe(self, request: Request, progress: Progress) -> None:
        """Nothing to keep."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Nothing to move."""

    def release(self, request: Request) -> None:
        """Nothing to forget."""

    def num_behind(self, request: Request) -> int:
        """Nothing is read."""
        return 0

    def num_reusable(self, request: Request) -> int:
        """All that the target has computed."""
        return request.num_computed

    def save(self, request: Request, start: int, stop: int) -> NDArray[np.float32] | None:
        """Nothing to save."""
        return None

    def restore(self, request: Request, pieces: Sequence[Piece], limit: int) -> int:
        """The target may take all."""
        return min(pieces[-1].stop, limit)

    def pause(self, request: Request) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to free."""
