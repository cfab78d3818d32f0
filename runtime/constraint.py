"""What a request's output must look like, position by position."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]  # [V], of the target's logits
"""True: the token may come next."""


class Constraint(Protocol):
    """Follows one request's output from its first token on.

    A `path` is drafted tokens that follow the committed output. Paths may be asked for in any
    order: only `commit` changes what the constraint knows. Each method raises `EngineError` where
    the grammar engine gives up; the request then fails, alone.
    """

    def allowed(self, path: Sequence[int]) -> Mask:
        """What may follow `path`, read-only; end-of-sequence tokens where the output may end.

        At least one token is. Raises `EngineError` where `path` itself is not allowed.
        """
        ...

    def num_allowed(self, path: Sequence[int]) -> int:
        """How many tokens of `path`, from the first, may follow one another."""
        ...

    def forced(self, path: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The text that must follow `path`, in the tokenizer's own tokens; empty where it is open.

        These are good drafts, no facts: other tokens may spell the same text.
        """
        ...

    def is_complete(self, path: Sequence[int]) -> bool:
        """True when nothing but the end may follow `path`, so that no such token is needed."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Follow a step's tokens; an end-of-sequence token comes last."""
        ...
