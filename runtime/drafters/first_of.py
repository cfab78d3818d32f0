"""Two drafters: a cheap lookup, and another for the requests for which it finds nothing."""

from collections.abc import Sequence

from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, Progress
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
    def engine_time_s(self) -> float:
        """Seconds inside an inference library, of both."""
        return self._lookup.engine_time_s + self._fallback.engine_time_s

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """The lookup's draft where it has one, else the fallback's."""
        found = self._lookup.propose(wanted)
        left = [
            DraftRequest(item.request, 0 if draft.token_ids else item.max_tokens)
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

    def close(self) -> None:
        """Free both, the second even where freeing the first fails."""
        try:
            self._lookup.close()
        finally:
            self._fallback.close()
