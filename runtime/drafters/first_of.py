"""Two drafters: a cheap lookup, and another for the requests for which it finds nothing."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, Progress
from specexport.runtime.prefix_cache import Piece
from specexport.runtime.request import Request


class FirstOf:
    """Asks `lookup` first, then `fallback` for the requests that are still without a draft.

    The fallback sees every request, with `max_tokens` 0 where it is not asked, so that it can
    keep its cache in step.
    """

    def __init__(self, lookup: Drafter, fallback: Drafter) -> None:
        """Owns both, and closes them."""
        self._lookup, self._fallback = lookup, fallback

    @property
    def is_free(self) -> bool:
        """As the fallback."""
        return self._fallback.is_free

    @property
    def engine_time_s(self) -> float:
        """Seconds inside an inference library, of both."""
        return self._lookup.engine_time_s + self._fallback.engine_time_s

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """The lookup's draft where it has one, else the fallback's."""
        found = self._lookup.propose(wanted)
        left = [
            replace(item, max_tokens=0) if draft.token_ids else item
            for item, draft in zip(wanted, found, strict=True)
        ]
        drawn = self._fallback.propose(left)
        return [
            first if first.token_ids else second for first, second in zip(found, drawn, strict=True)
        ]

    def observe(self, request: Request, progress: Progress) -> None:
        """Both learn what was computed."""
        self._lookup.observe(request, progress)
        self._fallback.observe(request, progress)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Both move the request."""
        self._lookup.move_slot(source, destination, length)
        self._fallback.move_slot(source, destination, length)

    def release(self, request: Request) -> None:
        """Both forget the request."""
        self._lookup.release(request)
        self._fallback.release(request)

    def num_behind(self, request: Request) -> int:
        """The fallback's."""
        return self._fallback.num_behind(request)

    def num_reusable(self, request: Request) -> int:
        """The fallback's: a lookup has no cache."""
        return self._fallback.num_reusable(request)

    def save(self, request: Request, start: int, stop: int) -> NDArray[np.float32] | None:
        """The fallback's."""
        return self._fallback.save(request, start, stop)

    def restore(self, request: Request, pieces: Sequence[Piece], limit: int) -> int:
        """The fallback's."""
        return self._fallback.restore(request, pieces, limit)

    def pause(self, request: Request) -> None:
        """Both learn of it."""
        self._lookup.pause(request)
        self._fallback.pause(request)

    def close(self) -> None:
        """Free both, the second even where freeing the first fails."""
        try:
            self._lookup.close()
        finally:
            self._fallback.close()
