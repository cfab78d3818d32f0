"""The engine that programs embed: load a bundle, submit prompts, iterate over what comes."""

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from specexport.errors import EngineError, RequestError
from specexport.export.manifest import read_manifest, verify_files
from specexport.runtime.grammar import Grammars
from specexport.runtime.load import load_loop
from specexport.runtime.options import EngineOptions
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.stats import EngineStats, RequestStats
from specexport.runtime.tokenizer import Message, TextStream, Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output: the tokens of one step and the text that they complete."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats


class Stream:
    """The output of one request, chunk by chunk. Iterating drives the engine."""

    def __init__(self, engine: "Engine", request: Request, decoder: TextStream) -> None:
        """Made by `Engine.submit`."""
        self._engine, self._request, self._decoder = engine, request, decoder
        self._chunks: deque[Chunk] = deque()
        self._text: list[str] = []
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

    def cancel(self) -> None:
        """End the request now; what it has can still be read."""
        self._engine.cancel(self._request)

    def result(self) -> Completion:
        """Run to the end and return the whole output."""
        for _ in self:
            pass
        reason = self._request.finish_reason
        assert reason is not None
        ids = tuple(self._request.output_ids)
        return Completion("".join(self._text), ids, reason, self._request.stats)

    def push(self, token_ids: tuple[int, ...]) -> None:
        """Called by the engine with what a step gave."""
        reason = self._request.finish_reason
        text = self._decoder.push(token_ids)
        if reason is not None:
            text += self._decoder.finish()
            self._is_finished = True
        self._text.append(text)
        self._chunks.append(Chunk(text, token_ids, reason))


class Engine:
    """A loaded bundle. Not thread-safe: use it from one thread."""

    def __init__(self, bundle: str | Path, options: EngineOptions = EngineOptions()) -> None:
        """Check and load `bundle`; raises `BundleError` or `ConfigError` with the remedy."""
        path = Path(bundle)
        self.manifest = read_manifest(path)
        if options.verify_files:
            verify_files(path, self.manifest)
        self.tokenizer = Tokenizer(path / "tokenizer")
        self.max_length = options.max_length or self.manifest.target.max_length
        self._grammars = Grammars(
            path / "tokenizer" / "tokenizer.json",
            self.manifest.target.vocab_size,
            self.manifest.eos_token_ids,
        )
        self._streams: dict[int, Stream] = {}
        self._ids = count()
        self._is_closed = False
        self._loop = load_loop(path, self.manifest, options, self.max_length)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Queue a prompt (text or token ids); raises `RequestError` if it cannot be served."""
        if self._is_closed:
            raise EngineError("The engine is closed; load the bundle again.")
        token_ids = self._token_ids(prompt)
        params = params or SamplingParams()
        request = Request(
            id=next(self._ids),
            params=params,
            max_tokens=self._max_tokens(token_ids, params),
            num_prompt=len(token_ids),
            token_ids=token_ids,
            constraint=self._grammars.constraint(params.structure) if params.structure else None,
        )
        stream = Stream(self, request, self.tokenizer.stream())
        self._streams[request.id] = stream
        self._loop.submit(request)
        return stream

    def submit_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Stream:
        """Queue a conversation, formatted by the model's own chat template."""
        return self.submit(self.tokenizer.encode_chat(messages), params)

    def step(self) -> None:
        """Run one step for all running requests; does nothing without one."""
        if not self._loop.has_work:
            return
        for new in self._loop.step():
            self._deliver(new.request, new.token_ids)

    def cancel(self, request: Request) -> None:
        """End a request; its stream finishes with reason `cancelled`."""
        if request.finish_reason is None:
            self._loop.cancel(request)
            self._deliver(request, ())

    def stats(self) -> EngineStats:
        """Counters since loading."""
        return self._loop.stats()

    def close(self) -> None:
        """Cancel what runs and free the engines."""
        for stream in list(self._streams.values()):
            stream.cancel()
        if not self._is_closed:
            self._is_closed = True
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _deliver(self, request: Request, token_ids: tuple[int, ...]) -> None:
        self._streams[request.id].push(token_ids)
        if request.finish_reason is not None:
            del self._streams[request.id]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens; raises `RequestError` if it is neither text nor whole numbers."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError:
            raise RequestError(
                f"The prompt is {prompt!r:.80}; it must be text or a list of token ids."
            ) from None

    def _max_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Output limit of a request; raises `RequestError` if prompt and output do not fit."""
        vocab_size, length = self.manifest.target.vocab_size, len(token_ids)
        if length == 0:
            raise RequestError(
                "The prompt is empty (no tokens). Give at least one character, "
                "or the model's begin-of-sequence token id."
            )
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"Token id {token_id} in the prompt is outside the vocabulary of "
                    f"{vocab_size}. Was it encoded with another tokenizer?"
                )
        room = self.max_length - length
        if room < 1:
            raise RequestError(
                f"The prompt has {length} tokens; the cache holds {self.max_length} for prompt and "
                "output. Shorten the prompt or load with a larger max length."
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"The prompt has {length} tokens and max_tokens is {params.max_tokens}, but the "
                f"cache holds {self.max_length}. Ask for at most {room} tokens, or load with a "
                "larger max length."
            )
        return params.max_tokens or room
