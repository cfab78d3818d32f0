"""The engine that programs embed: load a bundle, submit prompts, iterate over what comes."""

import operator
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Self

from specexport.errors import EngineError, RequestError
from specexport.export.manifest import read_manifest, verify_files
from specexport.runtime.admission import Admission
from specexport.runtime.commit import NewTokens
from specexport.runtime.constraint import Constraint
from specexport.runtime.grammar import Grammars
from specexport.runtime.load import load_loop
from specexport.runtime.options import EngineOptions
from specexport.runtime.output_text import OutputText
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request
from specexport.runtime.stats import EngineStats
from specexport.runtime.stream import Stream, StreamGroup
from specexport.runtime.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]


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
        self._streams: dict[int, Stream] = {}
        self._ids = count()
        self._is_closed = False
        self._loop = load_loop(path, self.manifest, options, self.max_length)
        self._grammars = Grammars(
            path / "tokenizer" / "tokenizer.json",
            self.manifest.target.vocab_size,
            self.manifest.eos_token_ids,
        )
        self._admission = Admission(
            self.manifest.target.vocab_size, self.max_length, self.manifest.eos_token_ids
        )

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Queue a prompt (text or token ids); raises `RequestError` if it cannot be served."""
        params = params or SamplingParams()
        if params.num_outputs > 1:
            raise RequestError(
                f"{'best_of' if params.best_of else 'n'} is {params.num_outputs}, but `submit` "
                "gives one output. Use `submit_many`."
            )
        return self.submit_many(prompt, params).streams[0]

    def submit_many(self, prompt: Prompt, params: SamplingParams) -> StreamGroup:
        """Queue a prompt whose `params` may ask for several outputs (`n`, `best_of`)."""
        if self._is_closed:
            raise EngineError("The engine is closed; load the bundle again.")
        token_ids = self._token_ids(prompt)
        max_tokens = self._admission.max_tokens(token_ids, params)
        prompt_text = ""
        if params.echo:
            prompt_text = prompt if isinstance(prompt, str) else self.tokenizer.decode(token_ids)
        streams = []
        for choice in params.choices():
            request = Request(
                id=next(self._ids),
                params=choice,
                max_tokens=max_tokens,
                num_prompt=len(token_ids),
                token_ids=list(token_ids),
                text=self._output_text(token_ids, choice),
                constraint=self._constraint(choice),
            )
            stream = Stream(self, request, prompt_text)
            self._streams[request.id] = stream
            self._loop.submit(request)
            streams.append(stream)
        return StreamGroup(self, streams, params)

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
            self._deliver(new)

    def cancel(self, request: Request) -> None:
        """End a request; its stream finishes with reason `cancelled`."""
        if request.finish_reason is None:
            self._loop.cancel(request)
            self._deliver(NewTokens(request, ()))

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

    def _deliver(self, new: NewTokens) -> None:
        self._streams[new.request.id].push(new.token_ids, new.logprobs)
        if new.request.finish_reason is not None:
            del self._streams[new.request.id]

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        """What follows the output; raises `RequestError` where it could not even begin."""
        if params.structure is None:
            return None
        constraint = self._grammars.constraint(params.structure)
        self._admission.check_first_token(constraint.allowed(()), params)
        return constraint

    def _output_text(self, prompt_ids: Sequence[int], params: SamplingParams) -> OutputText:
        """Echoed text goes on from the prompt's; else an output's text begins with itself."""
        context = prompt_ids if params.echo else ()
        return OutputText(
            self.tokenizer.stream(context),
            params.stop,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
        )

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
