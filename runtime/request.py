"""A request and its state."""

from dataclasses import dataclass, field
from enum import StrEnum

from specexport.runtime.constraint import Constraint
from specexport.runtime.params import SamplingParams
from specexport.runtime.stats import RequestStats


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, the last of the output; or the output's structure is complete."""
    LENGTH = "length"
    """`max_tokens`, or the end of the cache."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """Prompt and output so far.

    Invariants: the last token is never in the cache (`num_computed < len(token_ids)`); while
    running, `slot` is the request's row of the batch and of every cache.
    """

    id: int
    params: SamplingParams
    max_tokens: int
    num_prompt: int
    token_ids: list[int]
    constraint: Constraint | None = None
    num_computed: int = 0
    slot: int = -1
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the cache yet; 1 when decoding, but for those that were forced."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.num_output
