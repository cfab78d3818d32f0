"""From raw logits to the distribution that a request's options make of them, at any prefix.

Speculation looks at several positions of one step. Each has its own prefix: the committed text
and `path`, the drafted tokens above it. Everything here is a function of that prefix, so that a
drafted position gets what plain decoding would get there.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.constraint import Constraint
from specexport.runtime.distribution import Distribution, to_distribution
from specexport.runtime.params import SamplingParams

Logits = NDArray[np.float32]  # [V]
Ids = NDArray[np.int64]
_FIRST_SIZE = 64


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is done to the logits of some tokens; the others stay as they are.

    `bias` is added first, then `repetition` weakens what came out, then `penalty` is taken away.
    """

    token_ids: Ids  # [n], different ones
    bias: NDArray[np.float32]  # [n]
    repetition: NDArray[np.float32]  # [n]
    penalty: NDArray[np.float32]  # [n]


class LogitsProcessor:
    """Of one request. The order is that of docs/requests.md: masks, bias, penalties, sampling."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        end_ids: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """`end_ids` end the output, so none may come before it has `min_tokens` tokens."""
        self.params, self.end_ids = params, frozenset(end_ids)
        self._constraint = constraint
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else _ids(allowed)
        self._banned, self._ends = _ids(params.banned_token_ids), _ids(end_ids)
        self._biased = _ids(params.logit_bias)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._num_output = 0
        self.is_complete = False
        """True once nothing but the end may follow the output, by the constraint."""
        self._output = TokenCounts() if _penalises_output(params) else None
        self._text = TokenCounts() if params.repetition_penalty != 1 else None
        if self._text is not None:
            self._text.add(prompt_ids)
        self._is_plain = not (
            constraint or allowed or params.banned_token_ids or params.logit_bias
        ) and (self._output is self._text is None)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output."""
        self._num_output += len(token_ids)
        for counts in (self._output, self._text):
            if counts is not None:
                counts.add(token_ids)
        if self._constraint is not None:
            self._constraint.commit(token_ids)
            self.is_complete = self._constraint.is_complete(())

    def completes(self, path: Sequence[int]) -> bool:
        """True where nothing but the end may follow the output and `path`, by the constraint."""
        return self._constraint is not None and self._constraint.is_complete(path)

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Tokens that alone may come next, by the constraint.

        None where other options have a say in it, or want the logits of each position.
        """
        params = self.params
        if self._constraint is None or params.logprobs or params.prompt_logprobs:
            return ()
        if self._allowed is not None or params.banned_token_ids:
            return ()
        return self._constraint.forced((), max_tokens)

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        """What may come after the committed text and `path`, whose raw logits these are."""
        return to_distribution(self.scores(logits, path), self.params)

    def scores(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Masked, biased and penalised logits, -inf for what cannot come; `logits` stays as is."""
        is_short = self._num_output + len(path) < self.params.min_tokens
        if self._is_plain and not is_short:
            return logits
        scores = self._allow(logits, path)
        scores[self._banned] = -np.inf
        if is_short:
            scores[self._ends] = -np.inf
        scores[self._biased] += self._bias
        self._penalise(scores, path)
        return scores

    @property
    def is_sparse(self) -> bool:
        """Whether `adjustments` tell all: nothing rules out most of the vocabulary."""
        return self._constraint is None and self._allowed is None

    def adjustments(self, path: Sequence[int] = ()) -> Adjustments:
        """What `scores` does to logits, where that is sparse."""
        is_short = self._num_output + len(path) < self.params.min_tokens
        ruled_out = np.concatenate([self._banned, self._ends if is_short else _NONE])
        text, _ = self._text.after(path) if self._text else (_NONE, None)
        output, counts = self._output.after(path) if self._output else (_NONE, _NO_COUNTS)
        ids = np.unique(np.concatenate([ruled_out, self._biased, text, output]))
        bias, penalty = np.zeros((2, len(ids)), dtype=np.float32)
        repetition = np.ones(len(ids), dtype=np.float32)
        bias[np.searchsorted(ids, self._biased)] = self._bias
        bias[np.searchsorted(ids, ruled_out)] = -np.inf
        repetition[np.searchsorted(ids, text)] = self.params.repetition_penalty
        penalty[np.searchsorted(ids, output)] = self._penalty(counts)
        return Adjustments(ids, bias, repetition, penalty)

    def _penalty(self, counts: NDArray[np.float32]) -> NDArray[np.float32]:
        """By how often each token stands in the output."""
        return self.params.frequency_penalty * counts + self.params.presence_penalty

    def _allow(self, logits: Logits, path: Sequence[int]) -> Logits:
        """A copy that keeps what the constraint and `allowed_token_ids` allow."""
        if self._allowed is None:
            scores = logits.copy()
        else:
            scores = np.full_like(logits, -np.inf)
            scores[self._allowed] = logits[self._allowed]
        if self._constraint is not None:
            scores[~self._constraint.allowed(path)] = -np.inf
        return scores

    def _penalise(self, scores: Logits, path: Sequence[int]) -> None:
        """Only the penalised ids are touched. Repetition: CTRL (arXiv 1909.05858), section 4.1."""
        params = self.params
        if self._text is not None:
            ids, _ = self._text.after(path)
            found = scores[ids]
            weaker = np.float32(params.repetition_penalty)
            scores[ids] = np.where(found < 0, found * weaker, found / weaker)
        if self._output is not None:
            ids, counts = self._output.after(path)
            scores[ids] -= self._penalty(counts)


class TokenCounts:
    """How often each token occurred, in arrays that grow with new tokens alone."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST_SIZE, dtype=np.int64)
        self._counts = np.zeros(_FIRST_SIZE, dtype=np.float32)

    def add(self, token_ids: Sequence[int]) -> None:
        """Count tokens."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += 1

    def after(self, path: Sequence[int]) -> tuple[Ids, NDArray[np.float32]]:
        """Each token that occurred, or does in `path`, and how often; do not write to them."""
        num_known = len(self._places)
        ids, counts = self._ids[:num_known], self._counts[:num_known]
        if not path:
            return ids, counts
        new = [token_id for token_id in dict.fromkeys(path) if token_id not in self._places]
        places = {token_id: num_known + i for i, token_id in enumerate(new)}
        ids = np.concatenate([ids, _ids(new)])
        counts = np.concatenate([counts, np.zeros(len(new), dtype=np.float32)])
        for token_id in path:
            counts[self._places[token_id] if token_id in self._places else places[token_id]] += 1
        return ids, counts


def _penalises_output(params: SamplingParams) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty)


def _ids(token_ids: Iterable[int]) -> Ids:
    return np.fromiter(token_ids, dtype=np.int64)


_NONE, _NO_COUNTS = _ids(()), np.empty(0, dtype=np.float32)
