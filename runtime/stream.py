"""What comes back from a request: chunks as they come, and whole outputs."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specexport.errors import EngineError, RequestError
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.stats import RequestStats


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


class Steps(Protocol):
    """What drives a stream: the engine."""

    def step(self) -> None:
        """Run one step for all running requests."""
        ...

    def cancel(self, request: Request) -> None:
        """End a request."""
        ...


class Stream:
    """The output of one request, chunk by chunk. Iterating drives the engine."""

    def __init__(self, engine: Steps, request: Request, prompt_text: str = "") -> None:
        """Made by `Engine.submit`; the text begins with `prompt_text`."""
        self._engine, self._request = engine, request
        self._chunks: deque[Chunk] = deque()
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_text = prompt_text
        self._is_finished = False

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come; raises `EngineError` where the request failed."""
        while True:
            while not self._chunks and not self._is_finished:
                self._engine.step()
            if not self._chunks:
                break
            yield self._chunks.popleft()
        if self._request.finish_reason is FinishReason.ERROR:
            raise EngineError(self._request.error or "the request failed")

    @property
    def stats(self) -> RequestStats:
        """Times and acceptance of this request so far."""
        return self._request.stats

    @property
    def is_finished(self) -> bool:
        """True when everything has come, whether it was read or not."""
        return self._is_finished

    def cancel(self) -> None:
        """End the request now; what it has can still be read."""
        self._engine.cancel(self._request)

    def take(self) -> list[Chunk]:
        """The chunks that have come and were not read yet; runs nothing."""
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    def result(self) -> Completion:
        """Run to the end and return the whole output."""
        for _ in self:
            pass
        request = self._request
        assert request.finish_reason is not None
        wants = request.params
        return Completion(
            text="".join(self._text),
            token_ids=tuple(request.output_ids),
            finish_reason=request.finish_reason,
            stats=request.stats,
            stopped_by=request.stopped_by,
            logprobs=tuple(self._logprobs) if wants.logprobs else None,
            prompt_logprobs=(None, *request.prompt_logprobs) if wants.prompt_logprobs else None,
        )

    def push(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        """Called by the engine with what a step gave."""
        request = self._request
        assert request.text is not None
        text, self._prompt_text = self._prompt_text + request.text.take(), ""
        if request.finish_reason is not None:
            text += request.text.finish()
            self._is_finished = True
        self._text.append(text)
        self._logprobs.extend(logprobs)
        wanted = logprobs if request.params.logprobs else None
        self._chunks.append(Chunk(text, token_ids, request.finish_reason, wanted))


class StreamGroup:
    """The outputs of one request that asked for several."""

    def __init__(self, engine: Steps, streams: Sequence[Stream], params: SamplingParams) -> None:
        """Made by `Engine.submit_many`."""
        self._engine, self._params = engine, params
        self.streams = tuple(streams)

    def __iter__(self) -> Iterator[tuple[int, Chunk]]:
        """Chunks as they come, each with the number of its output.

        Raises `RequestError` where only the best outputs are kept: they are known in the end.
        """
        if self._params.is_ranked:
            raise RequestError(
                f"best_of is {self._params.best_of}, but n is {self._params.n}: which outputs are "
                "kept is known in the end. Read `results()`, or leave best_of out."
            )
        while True:
            for index, stream in enumerate(self.streams):
                for chunk in stream.take():
                    yield index, chunk
            if all(stream.is_finished for stream in self.streams):
                break
            self._engine.step()
        for stream in self.streams:
            stream.result()  # raises where the output failed

    def cancel(self) -> None:
        """End all of them now; what they have can still be read."""
        for stream in self.streams:
            stream.cancel()

    def results(self) -> list[Completion]:
        """Run to the end; the outputs in their order, or the best ones, best first."""
        completions = [stream.result() for stream in self.streams]
        if not self._params.is_ranked:
            return completions
        completions.sort(key=lambda completion: completion.mean_logprob, reverse=True)
        best = completions[: self._params.n]
        if self._params.logprobs:
            return best
        return [replace(completion, logprobs=None) for completion in best]
