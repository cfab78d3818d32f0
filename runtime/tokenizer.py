"""Text ↔ token ids, incremental decoding and the model's own chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from specexport.errors import BundleError, RequestError
from specexport.runtime.chat_template import make_environment

_REPLACEMENT = "\ufffd"
_MARK = "what the user says"

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
        self._config = {
            **_read_object(directory / "special_tokens_map.json"),
            **_read_object(directory / "tokenizer_config.json"),
        }
        self._template = _find_template(directory, self._config)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model expects around a text.

        Raises `RequestError` for text that is no valid Unicode (a lone surrogate, from bytes that
        are no UTF-8).
        """
        return self._encode(text, special=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn.

        Raises `RequestError` when the model has no chat template or refuses the messages.
        """
        return self._encode(self._render(messages), special=False)

    def encode_answered(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Token ids of a conversation that ends with the assistant's turn: before it, and of it.

        Raises `RequestError` as `encode_chat` does.
        """
        before = self._render(messages[:-1])
        whole = self._render(messages, is_open=False)
        if not whole.startswith(before):
            raise RequestError(
                "The model's chat template shows the last answer in another way than it asks for "
                "it, so the answer's tokens cannot be told apart."
            )
        answer = self._encode(whole[len(before) :], special=False)
        return self._encode(before, special=False), answer

    def encode_user_opening(self) -> list[int]:
        """Token ids of a conversation in which the user is about to speak.

        Raises `RequestError` when the model has no chat template, or one that shows no user's text.
        """
        text = self._render([{"role": "user", "content": _MARK}], is_open=False)
        opening, mark, _ = text.partition(_MARK)
        if not mark:
            raise RequestError("The model's chat template does not show what a user says.")
        return self._encode(opening, special=False)

    def stream(self, context: Sequence[int] = ()) -> "TextStream":
        """A decoder for tokens that come in pieces, after `context`."""
        return TextStream(self._tokenizer, context)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("The text is no valid Unicode. Give it as UTF-8.") from None
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def _render(self, messages: Sequence[Message], *, is_open: bool = True) -> str:
        if self._template is None:
            raise RequestError(
                "This model has no chat template, so it takes plain text only: "
                "use `generate` without --chat."
            )
        try:
            return (
                make_environment()
                .from_string(self._template)
                .render(
                    messages=[dict(m) for m in messages],
                    add_generation_prompt=is_open,
                    tools=None,
                    documents=None,
                    **self._special_tokens(),
                )
            )
        except Exception as error:  # a template is a program: anything may go wrong in it
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
    """Turns tokens into text as soon as whole characters are there.

    A token is decoded together with the one before it, since a tokenizer may treat the first of a
    text differently (SentencePiece drops its space).
    """

    def __init__(self, tokenizer: _Tokenizer, context: Sequence[int] = ()) -> None:
        """Start at the beginning of a text, or after the tokens of `context`."""
        self._tokenizer = tokenizer
        self._context = list(context)  # shown already
        self._held: list[int] = []  # not shown yet

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; bytes of an unfinished character wait."""
        return "".join(self._push(token_id) for token_id in token_ids)

    def unfinished(self) -> str:
        """What is held back, but for the character that is not whole."""
        return self._new_text().rstrip(_REPLACEMENT)

    def finish(self) -> str:
        """What was held back: a character cut off at the end shows as U+FFFD."""
        text, self._held = self._new_text(), []
        return text

    def _push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        """What the held tokens add after the context."""
        if not self._held:
            return ""
        before = self._decode(self._context)
        whole = self._decode(self._context + self._held)
        # A byte run that is no character spoils the text before it; then only what is held counts.
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is no valid JSON ({error}). Build the bundle again.") from None
    if not isinstance(value, dict):
        raise BundleError(f"{path} must hold a JSON object. Build the bundle again.")
    return value


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template
