"""Structures → constraints, through llguidance: an Earley parser over the tokenizer's own trie."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specexport.errors import EngineError, RequestError
from specexport.runtime.constraint import Mask
from specexport.runtime.structure import Choice, Grammar, JsonSchema, Regex, Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NAMES = {
    JsonSchema: "JSON schema",
    Regex: "regular expression",
    Grammar: "grammar",
    Choice: "choice",
}
_NO_TEXT = "\ufdd0"  # a code point that Unicode keeps out of texts
_MAX_KEPT = 32  # compiled structures
_PLAIN_REASONS = {"NoExtensionBias": "no text is described by it"}


class Grammars:
    """Compiles structures for one tokenizer and model; the engine is loaded when first used."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """`tokenizer_file` is a tokenizer.json, `vocab_size` the width of the target's logits."""
        self._tokenizer_file, self._vocab_size = tokenizer_file, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compile = lru_cache(_MAX_KEPT)(self._compiled)

    def constraint(self, structure: Structure) -> "GrammarConstraint":
        """At the beginning of an output; raises `RequestError` with the engine's reason."""
        name = _NAMES[type(structure)]
        matcher = self._compile(_source(structure), name)
        found = GrammarConstraint(matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        try:
            is_empty = found.is_complete(())
        except EngineError as error:
            raise RequestError(f"The {name} is refused. {error}") from None
        if is_empty:
            raise RequestError(f"The {name} is refused: it describes the empty text alone.")
        return found

    def _compiled(self, source: str, name: str) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error() or (probe := _one_step(matcher)).is_error():
            error = (matcher if matcher.is_error() else probe).get_error()
            raise RequestError(f"The {name} is refused: {_reason(error)}.")
        return matcher

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = _without_special_texts(self._tokenizer_file.read_text(encoding="utf-8"))
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise RequestError(
                f"Structured output cannot read this model's kind of tokenizer: {error}."
            ) from None


def _source(structure: Structure) -> str:
    """The structure in the engine's own notation."""
    try:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ModuleNotFoundError:
        raise RequestError(
            "Structured output needs the package llguidance, which is not installed. "
            "Install it with: pip install 'specexport[structured]'"
        ) from None
    if isinstance(structure, JsonSchema):
        if not structure.one_line:
            return str(LLMatcher.grammar_from_json_schema(structure.text))
        return str(
            LLMatcher.grammar_from_json_schema(
                structure.text,
                overrides={
                    "whitespace_flexible": False,
                    "item_separator": ", ",
                    "key_separator": ": ",
                },
            )
        )
    if isinstance(structure, Regex):
        return str(LLMatcher.grammar_from_regex(structure.pattern))
    if isinstance(structure, Choice):
        choices = (json.dumps(choice, ensure_ascii=False) for choice in structure.choices)
        alternatives = " | ".join(choices).replace("\x7f", "\\u007f")  # which JSON leaves as it is
        return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))
    if not re.search(r"^\s*[\w-]+\s*::=", structure.text, re.MULTILINE):
        return str(LLMatcher.grammar_from_lark(structure.text))
    try:
        return str(LLMatcher.grammar_from_lark(gbnf_to_lark(structure.text)))
    except Exception as error:  # the converter has several kinds, none of them public
        raise RequestError(f"The grammar is refused: {_reason(str(error))}.") from None


def _without_special_texts(tokenizer: str) -> str:
    """A tokenizer.json whose special tokens read like no text.

    Else the engine would spell a forced text such as `</s>` with the token of that name.
    """
    value = json.loads(tokenizer)
    names = {
        token["content"]: f"{_NO_TEXT}{token['id']}"
        for token in value.get("added_tokens", ())
        if token["special"]
    }
    for token in value.get("added_tokens", ()):
        token["content"] = names.get(token["content"], token["content"])
    model = value["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(value)


def _one_step(matcher: "LLMatcher") -> "LLMatcher":
    """A copy that went forth and back: some grammars cannot go on, others cannot go back."""
    probe = matcher.deep_copy()
    allowed = np.flatnonzero(_unpacked(probe.compute_bitmask()))
    probe.rollback(probe.try_consume_tokens(allowed[-1:].tolist()))
    return probe


def _unpacked(bits: bytes) -> Mask:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").view(np.bool_)


def _reason(report: str) -> str:
    """The sentence of an engine's report that says what is wrong."""
    found = re.search(r"^error: (.+)$", report, re.MULTILINE)
    line = found[1] if found else report.split("\n", 1)[0]
    reason = line.split("; following", 1)[0].strip().rstrip(".:")  # lists of what else there is
    return _PLAIN_REASONS.get(reason, reason)


@dataclass(frozen=True, slots=True)
class _Position:
    """What may follow one path."""

    allowed: Mask
    is_complete: bool
    only: int | None
    """The one token that may follow, where there is one and it does not end the output."""


class GrammarConstraint:
    """One output that is followed. The matcher wanders along paths and is rolled back."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`matcher` stands at the beginning and is owned from now on."""
        self._matcher, self._vocab_size = matcher, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._is_ended = False
        self._path: tuple[int, ...] = ()  # where the matcher stands
        self._positions: dict[tuple[int, ...], _Position] = {}

    def allowed(self, path: Sequence[int]) -> Mask:
        """The mask after `path`."""
        return self._position(tuple(path)).allowed

    def is_complete(self, path: Sequence[int]) -> bool:
        """True where the mask holds nothing but end-of-sequence tokens."""
        return self._position(tuple(path)).is_complete

    def num_allowed(self, path: Sequence[int]) -> int:
        """As many as the matcher takes, and an end-of-sequence token where it may stand."""
        text = self._text(path)
        num_taken = self._seek(text)
        may_end = num_taken == len(text) < len(path) and self._matcher.is_accepting()
        return num_taken + may_end

    def forced(self, path: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Follow the grammar until it leaves a choice."""
        tokens = tuple(path)
        for _ in range(max_tokens):
            position = self._positions.get(tokens) or self._compute(tokens)
            if position.only is None:
                self._positions[tokens] = position
                break
            tokens += (position.only,)
        return tokens[len(path) :]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Stand after the tokens, and keep what is known of paths through them."""
        tokens, text = tuple(token_ids), self._text(token_ids)
        if self._seek(text) < len(text):
            raise self._error("the output breaks the grammar")
        self._is_ended = len(text) < len(tokens)
        self._path = ()
        n = len(tokens)
        self._positions = {p[n:]: known for p, known in self._positions.items() if p[:n] == tokens}

    def _position(self, path: tuple[int, ...]) -> _Position:
        if path not in self._positions:
            self._positions[path] = self._compute(path)
        return self._positions[path]

    def _compute(self, path: tuple[int, ...]) -> _Position:
        text = self._text(path)
        if self._is_ended or len(text) < len(path):
            return self._end()
        if self._seek(text) < len(text):
            raise self._error("the draft breaks the grammar")
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._error("the grammar engine gave up")
        allowed = _unpacked(bits)[: self._vocab_size]
        allowed[self._eos_token_ids] = False
        others = int(np.count_nonzero(allowed))
        allowed[self._eos_token_ids] = can_end = self._matcher.is_accepting()
        if not others and not can_end:
            raise self._error("no token of the vocabulary can come next")
        only = int(np.argmax(allowed)) if others == 1 and not can_end else None
        return _Position(allowed, not others, only)

    def _end(self) -> _Position:
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[self._eos_token_ids] = True
        return _Position(allowed, is_complete=True, only=None)

    def _text(self, path: Sequence[int]) -> tuple[int, ...]:
        """The tokens before the first that ends the output."""
        ends = (i for i, token_id in enumerate(path) if token_id in self._eos_token_ids)
        return tuple(path[: next(ends, len(path))])

    def _seek(self, path: tuple[int, ...]) -> int:
        """Move the matcher along `path`; how many tokens it took."""
        shared = 0
        for ours, wanted in zip(self._path, path, strict=False):
            if ours != wanted:
                break
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        num_taken = shared + self._matcher.try_consume_tokens(list(path[shared:]))
        self._path = path[:num_taken]
        return num_taken

    def _error(self, what: str) -> EngineError:
        reason = _reason(self._matcher.get_error())
        return EngineError(f"The structure cannot be followed: {what}{reason and f': {reason}'}.")
