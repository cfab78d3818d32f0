"""What comes of a request: chunks as they come, and the whole output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specexport.errors import EngineError, RequestError
from specexport.runtime.commit import NewTokens
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.stats import AcceptanceStats, RequestStats


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output: the tokens of one step and the text that they complete."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    stopped_by: int | str | None = None
    """The token or the stop text that ended it."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each token of the prompt, where they were asked for; nothing predicts the first."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens; raises `RequestError` where none were asked for."""
        if self.logprobs is None:
            raise RequestError("This output has no log-probabilities. Ask for logprobs.")
        return sum(found.logprob for found in self.logprobs) / max(len(self.logprobs), 1)


class Output:
    """Gathers what one request gives. Only the thread that runs the loop may call `add`."""

    def __init__(self, request: Request, prompt_text: str = "") -> None:
        """The text begins with `prompt_text`."""
        self.request = request
        self.stats = _copied(request.stats)
        """As they were after the last step that gave something."""
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_text = prompt_text

    def add(self, new: NewTokens) -> Chunk:
        """What a step gave, as a chunk; the last one has the finish reason."""
        request = self.request
        assert request.text is not None
        text, self._prompt_text = self._prompt_text + request.text.take(), ""
        if request.finish_reason not in (None, FinishReason.ERROR):
            text += request.text.finish()
        self._text.append(text)
        self._logprobs.extend(new.logprobs)
        self.stats = _copied(request.stats)
        wanted = new.logprobs if request.params.logprobs else None
        return Chunk(text, new.token_ids, request.finish_reason, wanted)

    def check(self) -> None:
        """Raise `EngineError` where the request failed."""
        if self.request.finish_reason is FinishReason.ERROR:
            raise EngineError(self.request.error or "the request failed")

    def completion(self) -> Completion:
        """The whole of a finished output; raises `EngineError` where the request failed."""
        self.check()
        request = self.request
        assert request.finish_reason is not None
        wants = request.params
        return Completion(
            text="".join(self._text),
            token_ids=tuple(request.output_ids),
            finish_reason=request.finish_reason,
            stats=self.stats,
            stopped_by=request.stopped_by,
            logprobs=tuple(self._logprobs) if wants.logprobs else None,
            prompt_logprobs=(None, *request.prompt_logprobs) if wants.prompt_logprobs else None,
        )


def check_streamable(params: SamplingParams) -> None:
    """Raise `RequestError` where only the best outputs are kept: they are known in the end."""
    if params.is_ranked:
        raise RequestError(
            f"best_of is {params.best_of}, but n is {params.n}: which outputs are kept is known "
            "in the end. Read `results()`, or leave best_of out."
        )


def kept(completions: Sequence[Completion], params: SamplingParams) -> list[Completion]:
    """The outputs that were asked for: all in their order, or the best ones, best first."""
    if not params.is_ranked:
        return list(completions)
    ranked = sorted(completions, key=lambda completion: completion.mean_logprob, reverse=True)
    best = ranked[: params.n]
    if params.logprobs:
        return best
    return [replace(completion, logprobs=None) for completion in best]


def _copied(stats: RequestStats) -> RequestStats:
    """Other threads read it while the loop goes on counting."""
    acceptance = AcceptanceStats()
    acceptance.add(stats.acceptance)
    return replace(stats, acceptance=acceptance)
