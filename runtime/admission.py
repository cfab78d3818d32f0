"""What an engine can serve: requests that it cannot are refused before anything is generated."""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from specexport.errors import RequestError
from specexport.runtime.constraint import Mask
from specexport.runtime.params import SamplingParams

_MOST_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of a loaded model."""

    vocab_size: int
    max_length: int
    """Prompt and output tokens that the cache holds."""
    eos_token_ids: Collection[int]

    def max_tokens(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Output limit of a request; raises `RequestError` if it cannot be served."""
        self._check_prompt(prompt_ids)
        self._check_token_ids(params)
        room = self.max_length - len(prompt_ids)
        for name, value in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
            if value is not None and value > room:
                raise RequestError(
                    f"The prompt has {len(prompt_ids)} tokens and {name} is {value}, but the "
                    f"cache holds {self.max_length}. Ask for at most {room} tokens, or load with "
                    "a larger max length."
                )
        return params.max_tokens or room

    def check_first_token(self, allowed: Mask, params: SamplingParams) -> None:
        """Raise `RequestError` where none of the tokens that a structure allows may come."""
        left = set(np.flatnonzero(allowed).tolist()) - set(params.banned_token_ids)
        if params.allowed_token_ids is not None:
            left &= set(params.allowed_token_ids)
        if not left:
            raise RequestError(
                "allowed_token_ids or banned_token_ids rule out every token that the structure "
                "can begin with. Leave one of them out."
            )

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise RequestError(
                "The prompt is empty (no tokens). Give at least one character, "
                "or the model's begin-of-sequence token id."
            )
        for token_id in prompt_ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"Token id {token_id} in the prompt is outside the vocabulary of "
                    f"{self.vocab_size}. Was it encoded with another tokenizer?"
                )
        if len(prompt_ids) >= self.max_length:
            raise RequestError(
                f"The prompt has {len(prompt_ids)} tokens; the cache holds {self.max_length} for "
                "prompt and output. Shorten the prompt or load with a larger max length."
            )

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name, token_id in _named_ids(params):
            if token_id >= self.vocab_size:
                raise RequestError(
                    f"{name} names token {token_id}, which is outside the vocabulary of "
                    f"{self.vocab_size}. Was it encoded with another tokenizer?"
                )
        if params.top_logprobs > self.vocab_size:
            raise RequestError(
                f"top_logprobs is {params.top_logprobs}, but the vocabulary has "
                f"{self.vocab_size} tokens. Ask for no more than that."
            )
        allowed = params.allowed_token_ids
        left = set(range(self.vocab_size) if allowed is None else allowed)
        left -= set(params.banned_token_ids)
        if not left:
            raise RequestError(
                "banned_token_ids rules out the whole vocabulary: no token could come. Ban fewer."
            )
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        if params.min_tokens and left <= ends:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but every token that may come ends the "
                "output. Allow others, or set min_tokens to 0."
            )


def checked_priority(priority: int) -> int:
    """The priority; raises `RequestError` if it is none."""
    if not (_is_a(priority, Integral) and abs(priority) <= _MOST_PRIORITY):
        raise RequestError(
            f"priority is {priority!r:.80}; it must be a whole number from -{_MOST_PRIORITY} to "
            f"{_MOST_PRIORITY}. Requests of a higher one go first."
        )
    return int(priority)


def deadline_s(timeout_s: float | None) -> float | None:
    """When a request that may take `timeout_s` ends at the latest, by `time.perf_counter`."""
    if timeout_s is None:
        return None
    if not (_is_a(timeout_s, Real) and math.isfinite(timeout_s) and timeout_s > 0):
        raise RequestError(
            f"timeout_s is {timeout_s!r:.80}; it must be a number of seconds above 0, or None."
        )
    return time.perf_counter() + float(timeout_s)


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _named_ids(params: SamplingParams) -> Iterator[tuple[str, int]]:
    """Every token id that the options name, with the option."""
    for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            yield name, token_id
