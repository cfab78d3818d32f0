"""What a request may ask for. docs/requests.md says what each option does exactly."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

from specexport.errors import RequestError
from specexport.runtime.random import choice_seed
from specexport.runtime.structure import Structure

LogprobSource = Literal["raw", "processed"]

_INFINITY = float("inf")
_TINY = 5e-324  # "above 0"
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 1e308, "a number from 0 up"),
    "top_p": (_TINY, 1, "a number above 0 and at most 1"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "typical_p": (_TINY, 1, "a number above 0 and at most 1"),
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100; 1 is none"),
    "frequency_penalty": (-100, 100, "a number from -100 to 100; 0 is none"),
    "presence_penalty": (-100, 100, "a number from -100 to 100; 0 is none"),
}
_COUNTS: dict[str, tuple[float, float, str]] = {
    "top_k": (0, _INFINITY, "a whole number from 0 (keep all) up"),
    "seed": (0, 2**64 - 1, "a whole number from 0 to 2**64 - 1"),
    "min_tokens": (0, _INFINITY, "a whole number from 0 up"),
    "max_tokens": (1, _INFINITY, "a whole number from 1 up, or None"),
    "n": (1, 128, "a whole number from 1 to 128"),
    "best_of": (1, 128, "a whole number from 1 to 128, or None"),
    "top_logprobs": (0, _INFINITY, "a whole number from 0 up"),
}
_OPTIONAL = ("max_tokens", "best_of")
_SWITCHES = ("include_stop", "ignore_eos", "echo", "logprobs", "prompt_logprobs")
_ID_LISTS = ("allowed_token_ids", "banned_token_ids", "stop_token_ids")
_MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an output is drawn, what it may hold and when it ends; temperature 0 is greedy.

    Raises `RequestError` on a bad value, and on options that contradict each other.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities reach this sum; 1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens at least this likely, compared with the likeliest; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, up to this sum; 1 keeps all."""

    repetition_penalty: float = 1.0
    """Weakens the tokens of prompt and output: positive logits are divided, others multiplied."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it stands in the output."""
    presence_penalty: float = 0.0
    """Taken from the logits of the output's tokens, once."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """Nothing else may come; None allows all."""
    banned_token_ids: Sequence[int] = ()
    """Never come."""
    structure: Structure | None = None
    """What the whole output must look like."""

    min_tokens: int = 0
    """Nothing ends the output before it has so many tokens."""
    max_tokens: int | None = None
    """Output tokens at the most; None goes on to the end of the cache."""
    stop: Sequence[str] = ()
    """The output ends where one of these texts is complete; a single text may stand for itself."""
    stop_token_ids: Sequence[int] = ()
    """End the output as the model's own end-of-sequence tokens do."""
    include_stop: bool = False
    """Leave the stop text, or the text of the token that ended the output, in the text."""
    ignore_eos: bool = False

    seed: int = field(default_factory=lambda: secrets.randbits(63))
    n: int = 1
    """Outputs wanted; more than one come from `Engine.submit_many`."""
    best_of: int | None = None
    """Outputs drawn, of which the n with the highest mean log-probability are kept."""

    echo: bool = False
    """Begin the text with the prompt's."""
    logprobs: bool = False
    """Give each output token's log-probability."""
    top_logprobs: int = 0
    """Give those of so many likeliest tokens at each position too."""
    logprobs_of: LogprobSource = "raw"
    """The model's own distribution, or the one that these options make of it."""
    prompt_logprobs: bool = False
    """Give those of the prompt's tokens, of the model's own distribution."""

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            self._require(isinstance(getattr(self, name), bool), name, "True or False")
        self._check_numbers()
        self._check_ids()
        self._check_texts()
        self._check_bias()
        self._check_combinations()

    @property
    def num_outputs(self) -> int:
        """Outputs that are drawn."""
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """True when only the best of several outputs are kept."""
        return self.num_outputs > self.n

    def choices(self) -> list["SamplingParams"]:
        """The parameters of each output that is drawn; the first has the request's own seed."""
        return [
            replace(
                self,
                n=1,
                best_of=None,
                seed=choice_seed(self.seed, index),
                logprobs=self.logprobs or self.is_ranked,
            )
            for index in range(self.num_outputs)
        ]

    def _check_numbers(self) -> None:
        for kind, ranges in ((Real, _NUMBERS), (Integral, _COUNTS)):
            for name, (least, most, expected) in ranges.items():
                value = getattr(self, name)
                if value is None and name in _OPTIONAL:
                    continue
                self._require(_is_a(value, kind) and least <= value <= most, name, expected)

    def _check_ids(self) -> None:
        """Turn lists of token ids into tuples."""
        for name in _ID_LISTS:
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            ids = _as_tuple(value)
            is_good = ids is not None and all(map(_is_token_id, ids))
            self._require(is_good, name, "a list of token ids, from 0 up")
            object.__setattr__(self, name, tuple(map(int, ids or ())))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: no token could come. Allow some.")

    def _check_texts(self) -> None:
        """Turn the stop texts into a tuple."""
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop)
        is_good = stop is not None and all(isinstance(text, str) and text for text in stop)
        self._require(is_good, "stop", "a text or a list of texts, none of them empty")
        object.__setattr__(self, "stop", stop)
        known = get_args(LogprobSource)
        self._require(self.logprobs_of in known, "logprobs_of", " or ".join(map(repr, known)))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        is_good = isinstance(bias, Mapping) and all(
            _is_token_id(token_id) and _is_a(value, Real) and abs(value) <= _MAX_BIAS
            for token_id, value in bias.items()
        )
        self._require(
            is_good,
            "logit_bias",
            "token ids with numbers from -100 to 100 (to rule tokens out, use banned_token_ids)",
        )
        copied = {int(token_id): float(value) for token_id, value in bias.items()}
        object.__setattr__(self, "logit_bias", copied)

    def _check_combinations(self) -> None:
        """Refuse what cannot be had together, naming both options."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}. "
                "Lower the one or raise the other."
            )
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of is {self.best_of}, but n is {self.n}: that many cannot be kept. "
                "Raise best_of to n at least."
            )
        if self.structure is not None:
            self._check_structure()
        if self.temperature == 0:
            self._check_greedy()
        self._check_contradicting_ids()
        self._check_logprobs()

    def _check_structure(self) -> None:
        self._require(
            isinstance(self.structure, Structure),
            "structure",
            "a JsonSchema, a Regex, a Grammar, a Choice, or None",
        )
        for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids"):
            if value := getattr(self, name):
                raise RequestError(
                    f"{name} is {value!r:.80}, but the structure decides where the output ends. "
                    "Leave one of them out."
                )

    def _check_greedy(self) -> None:
        if self.num_outputs > 1:
            name = "best_of" if self.best_of else "n"
            raise RequestError(
                f"{name} is {self.num_outputs}, but temperature 0 gives the same output each time. "
                f"Set a temperature, or {name} to 1."
            )
        if self.typical_p < 1:
            raise RequestError(
                f"typical_p is {self.typical_p}, but temperature 0 takes the likeliest token, "
                "which typical_p may rule out. Set a temperature, or typical_p to 1."
            )

    def _check_contradicting_ids(self) -> None:
        allowed, banned = self.allowed_token_ids, set(self.banned_token_ids)
        if both := banned.intersection(allowed or ()):
            raise RequestError(
                f"Token {min(both)} stands in allowed_token_ids and in banned_token_ids. "
                "Take it out of one."
            )
        for token_id in self.logit_bias:
            if token_id in banned or (allowed is not None and token_id not in allowed):
                raise RequestError(
                    f"logit_bias names token {token_id}, which cannot come: banned_token_ids or "
                    "allowed_token_ids rule it out. Take it out of logit_bias."
                )

    def _check_logprobs(self) -> None:
        if self.top_logprobs and not (self.logprobs or self.prompt_logprobs):
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}, but no log-probabilities are asked for. "
                "Set logprobs (or prompt_logprobs) too."
            )
        if self.logprobs_of != "raw" and not (self.logprobs or self.is_ranked):
            raise RequestError(
                f"logprobs_of is {self.logprobs_of!r}, but the output's log-probabilities are not "
                "asked for. Set logprobs too."
            )

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise RequestError(f"{name} is {getattr(self, name)!r:.80}; it must be {expected}.")


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:  # noqa: ANN401 - whatever a caller gave
    return _is_a(value, Integral) and value >= 0


def _as_tuple(values: Any) -> tuple[Any, ...] | None:  # noqa: ANN401 - whatever a caller gave
    """The members of a list; None for what is no list."""
    if isinstance(values, str | bytes | Mapping):
        return None
    try:
        return tuple(values)
    except TypeError:
        return None
