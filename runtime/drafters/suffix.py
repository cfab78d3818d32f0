"""Suffix lookup: propose what followed the longest repeated suffix of the text, however long."""

from collections.abc import Sequence
from itertools import takewhile

from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import DraftRequest, NoDrafter
from specexport.runtime.request import Request
from specexport.runtime.suffix_automaton import Match, SuffixAutomaton
from specexport.runtime.suffix_store import END, SuffixStore

# Of a match in the store: a longer one would be no better evidence.
_MAX_STORE_MATCH = 32


class SuffixDrafter(NoDrafter):
    """Matches prompt and output against themselves, then against earlier requests' outputs.

    The longer the match, the longer the draft: `factor` times its length (as SuffixDecoding,
    arXiv 2411.04975). Of equally long matches the request's own, and of its own the latest counts.
    """

    def __init__(self, min_match: int, factor: int, store_tokens: int = 0) -> None:
        """Matches of `min_match` tokens count; `store_tokens` of finished outputs are kept."""
        self._min_match, self._factor = min_match, factor
        self._texts: dict[int, SuffixAutomaton] = {}  # by request id
        self._store = SuffixStore(store_tokens)

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """The continuation of the longest match; empty where nothing matches."""
        return [self._propose(w.request, w.max_tokens) if w.max_tokens else Draft() for w in wanted]

    def release(self, request: Request) -> None:
        """Drop the request's text; its output goes to the store."""
        self._texts.pop(request.id, None)
        self._store.add(request.output_ids)

    def _propose(self, request: Request, max_tokens: int) -> Draft:
        match = self._match(request)
        if match.length < self._min_match:
            return Draft()
        copied = match.continuation(min(max_tokens, self._factor * match.length))
        return Draft.certain(list(takewhile(lambda token_id: token_id != END, copied)))

    def _match(self, request: Request) -> Match:
        text = self._texts.setdefault(request.id, SuffixAutomaton())
        text.extend(request.token_ids[len(text.token_ids) :])
        found = (text.match_own(), self._store.match(request.token_ids[-_MAX_STORE_MATCH:]))
        return max(found, key=lambda match: match.length)
