"""Outputs of earlier requests, searched together."""

from collections.abc import Sequence

from specexport.runtime.suffix_automaton import Match, SuffixAutomaton

END = -1
"""Stands after each output; no token id, so that no match spans two outputs."""


class SuffixStore:
    """Holds at most `max_tokens` tokens, the ends of outputs included; 0 holds nothing.

    The older half goes when the newer is full: an automaton cannot forget single tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self._half = max_tokens // 2
        self._newer, self._older = SuffixAutomaton(), SuffixAutomaton()

    def __len__(self) -> int:
        return len(self._newer.token_ids) + len(self._older.token_ids)

    def add(self, output_ids: Sequence[int]) -> None:
        """Keep an output; of one longer than half the store, the last tokens."""
        room = self._half - 1  # beside its end
        if room < 1 or not output_ids:
            return
        kept = [*output_ids[-room:], END]
        if len(self._newer.token_ids) + len(kept) > self._half:
            self._newer, self._older = SuffixAutomaton(), self._newer
        self._newer.extend(kept)

    def match(self, context: Sequence[int]) -> Match:
        """The longest suffix of `context` that occurs in an output, in the newer half if in both.

        What follows it in the match's text runs up to `END`.
        """
        found = (self._newer.match(context), self._older.match(context))
        return max(found, key=lambda match: match.length)
