"""A request and its state."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from specexport.runtime.constraint import Constraint
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.output_text import OutputText
from specexport.runtime.params import SamplingParams
from specexport.runtime.processing import LogitsProcessor
from specexport.runtime.stats import RequestStats


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence or stop token, or the token that completes a stop text or the structure:
    the last one."""
    LENGTH = "length"
    """`max_tokens`, or the end of the cache."""
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    """Its time was up."""
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
    priority: int = 0
    """Requests of a higher one go first."""
    deadline_s: float | None = None
    """When it ends at the latest, by `time.perf_counter`."""
    num_computed: int = 0
    slot: int = -1
    num_computed_before: int = 0
    """Tokens that were computed when it lost its slot; it goes on once they are again."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    constraint: Constraint | None = None
    text: OutputText | None = None
    """Where somebody reads the text; without it no stop text is found."""
    processor: LogitsProcessor = field(init=False)
    """Made when the request is queued."""
    stopped_by: int | str | None = None
    """The token or the stop text that ended the output."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's second token and those after it, as far as they are computed."""

    def admit(self, eos_token_ids: Collection[int]) -> None:
        """Get ready to run on a model with these end-of-sequence tokens."""
        ends = () if self.params.ignore_eos else eos_token_ids
        prompt, end_ids = self.token_ids[: self.num_prompt], {*ends, *self.params.stop_token_ids}
        self.processor = LogitsProcessor(self.params, prompt, end_ids, self.constraint)

    def ends_with(self, token_id: int) -> bool:
        """Take the next output token into the text; True when it ends the output."""
        is_end = token_id in self.processor.end_ids
        if self.text is not None and (self.params.include_stop or not is_end):
            self.stopped_by = self.text.push(token_id)
        if is_end:
            self.stopped_by = token_id
        return self.stopped_by is not None

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
        """Tokens that are not in the cache yet; 1 when decoding, and those that were forced."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_to_compute(self) -> int:
        """Tokens up to the point where it goes on: where it once was, or the end of the text."""
        if self.num_computed < self.num_computed_before:
            return self.num_computed_before - self.num_computed
        return self.num_pending

    @property
    def is_catching_up(self) -> bool:
        """True while it computes its prompt, or again what it lost with its slot."""
        return self.num_output == 0 or self.num_computed < self.num_computed_before

    def give_up_slot(self) -> None:
        """Nothing of it is in a cache any more."""
        self.num_computed_before = max(self.num_computed, self.num_computed_before)
        self.num_computed = 0

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.num_output
