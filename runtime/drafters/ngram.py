"""N-gram lookup: propose what followed the same words earlier (prompt lookup decoding)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import DraftRequest, NoDrafter
from specexport.runtime.request import Request


@dataclass(slots=True)
class _Index:
    """For each n-gram that ends before the last token: the position after its latest occurrence."""

    num_indexed: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter(NoDrafter):
    """Looks up the last n tokens in prompt and output, the longest n first.

    Of several occurrences the latest counts. A copy that reaches the end of the text goes on with
    what it has copied, so that a repeating pattern gives a full draft.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        """N-grams of `min_ngram` to `max_ngram` tokens are looked up."""
        self._lengths = range(min_ngram, max_ngram + 1)
        self._indexes: dict[int, _Index] = {}

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """The continuation of the longest match; empty where nothing matches."""
        return [self._propose(w.request, w.max_tokens) if w.max_tokens else Draft() for w in wanted]

    def release(self, request: Request) -> None:
        """Drop the request's index."""
        self._indexes.pop(request.id, None)

    def _propose(self, request: Request, max_tokens: int) -> Draft:
        tokens = request.token_ids
        start = self._lookup(request)
        if start is None:
            return Draft()
        period = len(tokens) - start
        copied = tokens[start : start + max_tokens]
        return Draft.certain([copied[i % period] for i in range(max_tokens)])

    def _lookup(self, request: Request) -> int | None:
        """Where the text after the longest, latest match begins."""
        tokens, index = request.token_ids, self._indexes.setdefault(request.id, _Index())
        self._extend(index, tokens)
        for n in reversed(self._lengths):
            if n < len(tokens):
                start = index.after.get(tuple(tokens[-n:]))
                if start is not None:
                    return start
        return None

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        """Index all n-grams that end before the last token."""
        for end in range(index.num_indexed + 1, len(tokens)):  # n-gram = tokens[end - n : end]
            for n in self._lengths:
                if n <= end:
                    index.after[tuple(tokens[end - n : end])] = end
        index.num_indexed = max(index.num_indexed, len(tokens) - 1)
