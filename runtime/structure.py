"""What a request may ask its whole output to look like."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specexport.errors import RequestError


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema describes; `{}` is any JSON. Raises `RequestError` on anything else."""

    schema: Mapping[str, Any] | str = field(hash=False)
    """The schema, or its text."""
    one_line: bool = False
    """Write `{"a": 1, "b": [2, 3]}`, so that more is known before; else with any whitespace."""

    def __post_init__(self) -> None:
        if not isinstance(self._parsed(), dict):
            raise RequestError(
                f"The JSON schema is {self.schema!r:.80}; it must be an object, or its text."
            )

    @property
    def text(self) -> str:
        """The schema as JSON."""
        return json.dumps(self._parsed())

    def _parsed(self) -> Any:  # noqa: ANN401 - whatever the text holds
        try:
            if isinstance(self.schema, str):
                return json.loads(self.schema)
            return json.loads(json.dumps(self.schema))
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"The JSON schema is no JSON: {error}.") from None


JSON_OBJECT = JsonSchema('{"type": "object"}')
"""Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression (Rust's syntax) matches from its first to its last letter."""

    pattern: str

    def __post_init__(self) -> None:
        _require_text(self.pattern, "The regular expression")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a context-free grammar, from `start` (Lark's notation) or `root` (GBNF's) on."""

    text: str

    def __post_init__(self) -> None:
        _require_text(self.text, "The grammar")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts."""

    choices: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.choices, str) or not self.choices:
            raise RequestError(f"The choices are {self.choices!r}; give at least one text.")
        for choice in self.choices:
            _require_text(choice, "A choice")
        object.__setattr__(self, "choices", tuple(self.choices))


Structure = JsonSchema | Regex | Grammar | Choice


def _require_text(value: object, name: str) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} is {value!r:.80}; it must be a text that is not empty.")
