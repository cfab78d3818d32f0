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
    order: only `commit` changes what the constraint knows.
    """

    def allowed(self, path: Sequence[int]) -> Mask:
        """What may follow `path`, read-only; end-of-sequence tokens where the output may end.

        At least one token is. Raises `EngineError` where `path` itself is not allowed, or where
        the grammar engine gives up.
        """
        ...

    def num_allowed(self, path: Sequence[int]) -> int:
        """How many tokens of `path`, from the first, may follow one another. Never raises."""
        ...

    def forced(self, path: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The tokens after `path` as long as a single one is allowed; none of them ends the output.

        Their probability is 1 whatever the target says. Raises as `allowed` does.
        """
        ...

    def is_complete(self, path: Sequence[int]) -> bool:
        """True where nothing but the end may follow `path`: it needs no token that says so.

        Raises as `allowed` does.
        """
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Follow a step's tokens; an end-of-sequence token comes last. Raises as `allowed` does."""
        ...
