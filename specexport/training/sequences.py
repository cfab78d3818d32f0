"""Answers → the sequences of a data set, cut into shards and batches.

Shards hang on the answers before them alone, so a file of answers that has grown changes the last
shard and adds others.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specexport.errors import ConfigError
from specexport.training.answers import Answer
from specexport.training.questions import fraction

_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class TrainingText:
    """One sequence: what comes before the answer, and the answer."""

    source: str
    token_ids: tuple[int, ...]
    num_prompt: int
    is_held_out: bool

    @classmethod
    def of(cls, answer: Answer, max_length: int) -> "TrainingText":
        """Cut to `max_length`."""
        token_ids = (*answer.prompt_ids, *answer.answer_ids)[:max_length]
        is_held_out = fraction(answer.key, "held out") < _HELD_OUT_SHARE
        return cls(answer.source, token_ids, len(answer.prompt_ids), is_held_out)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that are learnt."""
        return max(len(self) - self.num_prompt, 0)

    @property
    def is_answer(self) -> NDArray[np.bool_]:  # [T]
        """Where they stand."""
        return np.arange(len(self)) >= self.num_prompt


@dataclass(frozen=True)
class ShardPlan:
    """The sequences of one shard, in the order of the answers."""

    texts: tuple[TrainingText, ...]

    @property
    def num_tokens(self) -> int:
        """Of all its sequences."""
        return sum(len(text) for text in self.texts)

    @cached_property
    def sha256(self) -> str:
        """Of all that a shard is computed from, the target aside."""
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(np.array([len(text), text.num_prompt, *text.token_ids]).tobytes())
        return digest.hexdigest()


def read_texts(answers: Iterable[Answer], max_length: int, vocab_size: int) -> list[TrainingText]:
    """Sequences that hold something to learn; `ConfigError` for a token the target lacks."""
    texts = [TrainingText.of(answer, max_length) for answer in answers]
    for text in texts:
        if text.token_ids and not 0 <= min(text.token_ids) <= max(text.token_ids) < vocab_size:
            raise ConfigError(
                f"An answer of {text.source} holds token {max(text.token_ids)}, but the target has "
                f"{vocab_size} tokens. Make the answers again with this target."
            )
    return [text for text in texts if text.num_answer_tokens and len(text) > 1]


def within_budget(
    texts: Sequence[TrainingText], token_bytes: int, budget_bytes: int | None
) -> list[TrainingText]:
    """The first texts, as many as fit."""
    if budget_bytes is None:
        return list(texts)
    ends = np.cumsum([len(text) * token_bytes for text in texts])
    return list(texts[: int(np.searchsorted(ends, budget_bytes, side="right"))])


def plan_shards(
    texts: Iterable[TrainingText], token_bytes: int, shard_bytes: int
) -> Iterator[ShardPlan]:
    """Neighbouring texts, until another would be too much; one is never cut."""
    gathered: list[TrainingText] = []
    size_bytes = 0
    for text in texts:
        if gathered and size_bytes + len(text) * token_bytes > shard_bytes:
            yield ShardPlan(tuple(gathered))
            gathered, size_bytes = [], 0
        gathered.append(text)
        size_bytes += len(text) * token_bytes
    if gathered:
        yield ShardPlan(tuple(gathered))


def batches_by_length(
    texts: Sequence[TrainingText], batch_tokens: int, max_rows: int
) -> Iterator[list[int]]:
    """Numbers of texts of like length: at most `max_rows`, and padded `batch_tokens`."""
    batch: list[int] = []
    for number in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        is_full = len(batch) == max_rows or (len(batch) + 1) * len(texts[number]) > batch_tokens
        if batch and is_full:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
