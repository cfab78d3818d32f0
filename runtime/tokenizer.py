"""Text ↔ token ids, incremental decoding and the model's own chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from specexport.errors import BundleError, RequestError

Message = Mapping[str, str]
"""`{"role": "user", "content": "…"}`"""


class Tokenizer:
    """The tokenizer files of a bundle."""

    def __init__(self, directory: Path) -> None:
        """Read tokenizer.json; raises `BundleError` if it is damaged."""
        try:
            self._tokenizer = _Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:
            raise BundleError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        path = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        self._template = _find_template(directory, self._config)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model expects around a text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn.

        Raises `RequestError` when the model has no chat template or refuses the messages.
        """
        text = self._render(messages)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def stream(self) -> "TextStream":
        """A decoder for tokens that come in pieces."""
        return TextStream(self._tokenizer)

    def _render(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            raise RequestError(
                "This model has no chat template, so it takes plain text only: "
                "use `generate` without --chat."
            )
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            return environment.from_string(self._template).render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=True,
                **self._special_tokens(),
            )
        except TemplateError as error:
            raise RequestError(f"The model's chat template refuses the messages: {error}") from None

    def _special_tokens(self) -> dict[str, str]:
        tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self._config.get(name)
            if isinstance(value, dict):  # an AddedToken written out
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
        return tokens


class TextStream:
    """Turns token runs into text as soon as whole characters are there."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        """Start at the beginning of an output."""
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._emitted = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; bytes of an unfinished character wait."""
        self._token_ids.extend(token_ids)
        pieces = (self._decoder.step(self._tokenizer, token_id) for token_id in token_ids)
        text = "".join(piece for piece in pieces if piece)
        self._emitted += text
        return text

    def finish(self) -> str:
        """What was held back: a cut-off character shows as U+FFFD."""
        whole = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))
        return whole[len(self._emitted) :] if whole.startswith(self._emitted) else ""


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
