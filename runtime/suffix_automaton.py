"""Which part of a growing text occurred before: a suffix automaton (Blumer et al. 1985), online."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A token of a text in a loop ends as many classes of suffixes as the text has tokens; only this
# many, the longest first, learn of their new occurrence.
_MAX_CLASSES = 16
_ROOT = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens of a context stand at `text[start - length : start]`."""

    length: int
    start: int
    text: list[int]

    def continuation(self, num_tokens: int) -> list[int]:
        """What follows; at the end of the text, the copy goes on with what it has copied."""
        period = len(self.text) - self.start
        copied = self.text[self.start : self.start + num_tokens]
        return [copied[i % period] for i in range(num_tokens)]


class SuffixAutomaton:
    """All substrings of `token_ids`, extended by a token in amortised constant time.

    A state stands for the substrings that end at the same places of the text; its link leads to
    the longest of their suffixes that ends at other places too.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # by state: token → state
        self._link = [_ROOT]  # by state
        self._length = [0]  # by state: tokens of its longest substring
        self._after = [0]  # by state: the position after an occurrence, as late as is known
        self._last = _ROOT  # the whole text

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            self._record_occurrence()
            self.token_ids.append(token_id)
            self._append(token_id)

    def match_own(self) -> Match:
        """The longest suffix of the text that also ends before the last token; 0 without one.

        Of its earlier occurrences the latest, but for texts in a loop, where it is an earlier one.
        """
        return self._match(self._link[self._last], self._length[self._link[self._last]])

    def match(self, context: Sequence[int]) -> Match:
        """The longest suffix of `context` that occurs in the text, and one of its occurrences."""
        state, length = _ROOT, 0
        for token_id in context:
            while state != _ROOT and token_id not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token_id in self._next[state]:
                state = self._next[state][token_id]
                length += 1
        return self._match(state, length)

    def _match(self, state: int, length: int) -> Match:
        return Match(length, self._after[state], self.token_ids)

    def _record_occurrence(self) -> None:
        """The suffixes of the text end here, which is an earlier place once a token follows."""
        state = self._last
        for _ in range(_MAX_CLASSES):
            self._after[state] = len(self.token_ids)
            state = self._link[state]
            if state == _ROOT:
                break

    def _append(self, token_id: int) -> None:
        whole = self._add_state({}, _ROOT, len(self.token_ids), len(self.token_ids))
        state = self._last
        self._last = whole
        while token_id not in self._next[state]:
            self._next[state][token_id] = whole
            if state == _ROOT:
                return  # the token is new
            state = self._link[state]
        self._link[whole] = self._suffix_state(state, token_id)

    def _suffix_state(self, state: int, token_id: int) -> int:
        """The state whose longest substring is that of `state` and the token; split off if needed.

        The split keeps the shorter substrings apart, which now end at one more place.
        """
        found = self._next[state][token_id]
        length = self._length[state] + 1
        if self._length[found] == length:
            return found
        split = self._add_state(
            dict(self._next[found]), self._link[found], length, self._after[found]
        )
        self._link[found] = split
        while self._next[state].get(token_id) == found:
            self._next[state][token_id] = split
            if state == _ROOT:
                break
            state = self._link[state]
        return split

    def _add_state(self, following: dict[int, int], link: int, length: int, after: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._after.append(after)
        return len(self._next) - 1
