"""What a request may ask for."""

import secrets
from dataclasses import dataclass, field
from numbers import Integral, Real

from specexport.errors import RequestError
from specexport.runtime.structure import Structure


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the output is drawn; temperature 0 is greedy. Raises `RequestError` on a bad value."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities reach this sum; 1 keeps all."""
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    max_tokens: int | None = None
    """Output tokens at the most; None goes on to the end of the cache."""
    ignore_eos: bool = False
    structure: Structure | None = None
    """What the whole output must look like."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            self._require(_is_a(getattr(self, name), Real), name, "a number")
        for name in ("top_k", "seed"):
            self._require(_is_a(getattr(self, name), Integral), name, "a whole number")
        if self.max_tokens is not None:
            self._require(_is_a(self.max_tokens, Integral), "max_tokens", "a whole number or None")
        self._require(0 <= self.temperature < float("inf"), "temperature", "a number from 0 up")
        self._require(self.top_k >= 0, "top_k", "a whole number from 0 (keep all) up")
        self._require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._require(0 <= self.seed < 2**64, "seed", "a whole number from 0 to 2**64 - 1")
        self._require(
            self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1, or None"
        )

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {expected}.")


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
