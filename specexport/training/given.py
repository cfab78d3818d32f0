"""Texts that are given to learn from, instead of answers that the target makes."""

from collections.abc import Collection, Iterator
from pathlib import Path

from specexport.bench.prompts import Prompt, holds_json, read_prompts
from specexport.errors import ConfigError, RequestError
from specexport.runtime.tokenizer import Tokenizer
from specexport.training.answers import Answer
from specexport.training.questions import key_of, read_text


def read_given(
    path: Path, tokenizer: Tokenizer, eos_token_ids: Collection[int], max_length: int
) -> Iterator[Answer]:
    """Conversations that end with an answer; of any other file the text, in pieces.

    Raises `ConfigError` for a conversation without an answer.
    """
    if not holds_json(path):
        yield from _pieces(path, tokenizer, max_length)
        return
    for prompt in read_prompts(path):
        prompt_ids, answer_ids = _split(prompt, tokenizer)
        ends = [i + 1 for i, token_id in enumerate(answer_ids) if token_id in eos_token_ids]
        yield _given(path, prompt_ids, answer_ids[: ends[0] if ends else None])


def _pieces(path: Path, tokenizer: Tokenizer, max_length: int) -> Iterator[Answer]:
    token_ids = tokenizer.encode(read_text(path))
    for start in range(0, len(token_ids), max_length):
        yield _given(path, [], token_ids[start : start + max_length])


def _split(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    messages = prompt.content
    if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ConfigError(
            f"{prompt.origin}: this is no conversation that ends with an answer. Let the target "
            "answer it, or give one."
        )
    try:
        return tokenizer.encode_answered(messages)
    except RequestError as error:
        raise ConfigError(f"{prompt.origin}: {error}") from None


def _given(path: Path, prompt_ids: list[int], answer_ids: list[int]) -> Answer:
    # What is held out hangs on the question; a piece of a text has none but itself.
    return Answer(
        key=key_of(prompt_ids or answer_ids),
        source=path.name,
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer_ids),
    )
