"""The prompts of a benchmark: those that ship with specexport, or a user's file."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from specexport.errors import ConfigError, RequestError
from specexport.runtime.tokenizer import Message, Tokenizer

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_EXPECTED = 'a JSON object with "prompt" (a text) or "messages" (a conversation)'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a conversation; `origin` says in errors where it stands."""

    origin: str
    content: str | tuple[Message, ...]


def shipped_prompts() -> list[Prompt]:
    """32 prompts of four kinds: questions, code, editing and summaries, extraction."""
    text = files("specexport.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return [
        Prompt(f"shipped prompt {number}", _from_json(line))
        for number, line in enumerate(text.splitlines(), start=1)
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line: JSON in .jsonl, .ndjson and .json files, else text; blank lines are none.

    A file that ends in .gz is unpacked.

    Raises `ConfigError` with the line of the first mistake.
    """
    parse = _from_json if holds_json(path) else str.strip
    prompts = []
    for number, line in _lines(path):
        origin = f"{path}, line {number}"
        try:
            prompts.append(Prompt(origin, parse(line)))
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}.") from None
    if not prompts:
        raise ConfigError(f"{path} holds no prompt. Write one on each line.")
    return prompts


def holds_json(path: Path) -> bool:
    """Whether a file of this name has JSON on its lines."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith(_JSON_SUFFIXES)


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, room: int
) -> list[tuple[int, ...]]:
    """Token ids: of a chat where the model has a chat template, else of the text.

    Raises `ConfigError` for one that cannot be encoded or has more than `room` tokens.
    """
    return [_encode(prompt, tokenizer, room) for prompt in prompts]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """As `encode_prompts`, of any length."""
    content = prompt.content
    try:
        if isinstance(content, str) and not tokenizer.has_chat_template:
            return tokenizer.encode(content)
        chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return tokenizer.encode_chat(chat)
    except RequestError as error:
        raise ConfigError(f"{prompt.origin}: {error}") from None


def _encode(prompt: Prompt, tokenizer: Tokenizer, room: int) -> tuple[int, ...]:
    ids = encode_prompt(prompt, tokenizer)
    if not 0 < len(ids) <= room:
        raise ConfigError(
            f"{prompt.origin} has {len(ids)} tokens; it must have one at the least, and the "
            f"bundle's cache has room for {room} beside the output. Give other --prompts, or lower "
            "--max-tokens."
        )
    return tuple(ids)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    for number, line in enumerate(_read(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{path}, line {number}: this is no UTF-8. Convert it.") from None
        if text.strip():
            yield number, text


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except (EOFError, zlib.error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"{path} cannot be read: {reason or error}.") from None


def _from_json(line: str) -> str | tuple[Message, ...]:
    """The prompt of one object; raises `ValueError` with what is wrong."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON ({error}); expected {_EXPECTED}") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ValueError(f"expected {_EXPECTED}")
    if "messages" in value:
        return _messages(value["messages"])
    if not isinstance(value["prompt"], str) or not value["prompt"].strip():
        raise ValueError('"prompt" must be a text that is not empty')
    return value["prompt"]


def _messages(value: Any) -> tuple[Message, ...]:  # noqa: ANN401 - whatever the file holds
    is_good = isinstance(value, list) and all(_is_message(entry) for entry in value)
    if not is_good or not value:
        raise ValueError(
            '"messages" must be a list of objects with the texts "role" and "content", '
            "one at the least"
        )
    return tuple({"role": entry["role"], "content": entry["content"]} for entry in value)


def _is_message(entry: Any) -> bool:  # noqa: ANN401
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("role", "content")
    )
