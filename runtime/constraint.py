"""What may follow a text by a rule of its own, such as a grammar."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Of one request: says which tokens may come next. Its state is the committed output."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:  # [V]
        """What may follow the committed output and the drafted tokens `path`; changes nothing."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output."""
        ...
