"""A draft for each request whose text a step computes to its end."""

from collections.abc import Sequence
from dataclasses import replace

from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest
from specexport.runtime.lengths import DraftLengths, RowState
from specexport.runtime.turn import Turn


class Proposer:
    """Asks the drafter for drafts of the sizes that are chosen."""

    def __init__(self, drafter: Drafter, lengths: DraftLengths, max_depth: int) -> None:
        """Drafts are `max_depth` deep at the most."""
        self._drafter, self._lengths, self._max_depth = drafter, lengths, max_depth

    def propose(self, turns: Sequence[Turn]) -> list[Draft]:
        """One draft, maybe empty, for each."""
        rows = [self._row_state(turn) for turn in turns]
        return self._found(turns, rows) if self._drafter.is_free else self._made(turns, rows)

    def _row_state(self, turn: Turn) -> RowState:
        request = turn.request
        room = min(self._max_depth, request.num_left - 1)
        return RowState(
            request.id,
            request.num_computed + turn.num_tokens,
            turn.num_tokens,
            turn.is_whole,
            max_depth=room if turn.is_whole else 0,
            num_behind=self._drafter.num_behind(request),
        )

    def _found(self, turns: Sequence[Turn], rows: Sequence[RowState]) -> list[Draft]:
        """Drafts that cost nothing to make: which pay is decided once they are there."""
        wanted = [DraftRequest(t.request, r.max_depth) for t, r in zip(turns, rows, strict=True)]
        drafts = self._drafter.propose(wanted)
        rows = [replace(r, max_depth=d.depth) for r, d in zip(rows, drafts, strict=True)]
        sizes = self._lengths.choose(rows)
        return [draft.cut(size.depth) for draft, size in zip(drafts, sizes, strict=True)]

    def _made(self, turns: Sequence[Turn], rows: Sequence[RowState]) -> list[Draft]:
        """Drafts of the sizes that promise to pay."""
        sizes = self._lengths.choose(rows)
        return self._drafter.propose(
            [
                DraftRequest(turn.request, size.depth, size.width)
                for turn, size in zip(turns, sizes, strict=True)
            ]
        )
