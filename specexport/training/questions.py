"""Prompts for a target, from chat files, JSON lines and plain texts.

A question is known by the hash of its tokens: it decides how it is answered and whether it is held
out, so neither depends on the order of files.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from specexport.bench.prompts import Prompt, encode_prompt, holds_json, read_prompts
from specexport.errors import ConfigError
from specexport.runtime.tokenizer import Tokenizer

_PASSAGE_WORDS = 120
_TASKS = (
    "Summarize the following text in a few sentences.",
    "Explain the following text in simple words.",
    "List the main points of the following text.",
    "Write three questions about the following text and answer them.",
    "Continue the following text.",
)


@dataclass(frozen=True)
class Question:
    """Token ids of a prompt, ready for the answer; `source` names its file."""

    source: str
    token_ids: tuple[int, ...]

    @cached_property
    def key(self) -> str:
        """SHA-256 of the tokens."""
        return key_of(self.token_ids)


def key_of(token_ids: Sequence[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(np.array(token_ids, dtype=np.int64).tobytes()).hexdigest()


def fraction(key: str, purpose: str) -> float:
    """A number in [0, 1) that hangs on nothing but a question and what it is for."""
    digest = hashlib.sha256(f"{purpose} {key}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def read_questions(path: Path, tokenizer: Tokenizer, room: int) -> list[Question]:
    """The questions of a file that have at most `room` tokens, each once.

    JSON lines hold prompts or conversations (a last turn of the assistant is left out: the target
    answers itself); of any other text each passage becomes a task. Raises `ConfigError` where the
    file holds none.
    """
    prompts = map(_open, read_prompts(path)) if holds_json(path) else _tasks(path, tokenizer)
    found = (Question(path.name, tuple(encode_prompt(p, tokenizer))) for p in prompts)
    questions = {q.key: q for q in found if 0 < len(q.token_ids) <= room}
    if not questions:
        raise ConfigError(f"{path} holds no prompt of at most {room} tokens.")
    return list(questions.values())


def _open(prompt: Prompt) -> Prompt:
    """Without the answer that it may end with."""
    if isinstance(prompt.content, tuple) and prompt.content[-1]["role"] == "assistant":
        if len(prompt.content) == 1:
            raise ConfigError(f"{prompt.origin}: the conversation has an answer and no question.")
        return Prompt(prompt.origin, prompt.content[:-1])
    return prompt


def _tasks(path: Path, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Something to do with each passage; a model without a chat template continues it."""
    for number, passage in enumerate(passages(read_text(path)), start=1):
        task = f"{_TASKS[number % len(_TASKS)]}\n\n{passage}"
        content = task if tokenizer.has_chat_template else passage
        yield Prompt(f"{path}, passage {number}", content)


def passages(text: str) -> Iterator[str]:
    """Paragraphs, joined until they have some 120 words."""
    gathered: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        gathered.append(paragraph.strip("\n"))
        if sum(len(part.split()) for part in gathered) >= _PASSAGE_WORDS:
            yield "\n\n".join(gathered)
            gathered = []
    if any(part.strip() for part in gathered):
        yield "\n\n".join(gathered)


def read_text(path: Path) -> str:
    """A UTF-8 file; raises `ConfigError` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text. Convert it.") from None
