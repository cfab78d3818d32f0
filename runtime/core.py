"""A loaded bundle: prompts become requests, and one thread runs them. What both engines share."""

import operator
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from weakref import finalize

from specexport.errors import RequestError
from specexport.export.manifest import Manifest, read_manifest, verify_files
from specexport.runtime.admission import Admission, checked_priority, deadline_s
from specexport.runtime.constraint import Constraint
from specexport.runtime.grammar import Grammars
from specexport.runtime.load import load_loop
from specexport.runtime.loop_thread import LoopThread
from specexport.runtime.options import EngineOptions
from specexport.runtime.output import Output
from specexport.runtime.output_text import OutputText
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request
from specexport.runtime.stats import EngineStats
from specexport.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Core:
    """Every method may be called from any thread, several at once."""

    def __init__(self, bundle: str | Path, options: EngineOptions) -> None:
        """Check and load `bundle`; raises `BundleError` or `ConfigError` with the remedy."""
        path = Path(bundle)
        self.manifest = read_manifest(path)
        if options.verify_files:
            verify_files(path, self.manifest)
        self.tokenizer = Tokenizer(path / "tokenizer")
        self.max_length = options.max_length or self.manifest.target.max_length
        self._ids = count()
        vocab_size, eos_token_ids = self.manifest.target.vocab_size, self.manifest.eos_token_ids
        self._grammars = Grammars(path / "tokenizer" / "tokenizer.json", vocab_size, eos_token_ids)
        self._admission = Admission(vocab_size, self.max_length, eos_token_ids)
        loop = load_loop(path, self.manifest, options, self.max_length)
        self.thread = LoopThread(loop, options.max_slots, options.max_waiting)
        # The interpreter's end closes the thread; where the engine is dropped before, it only has
        # to finish what streams may still be read for.
        finalize(self, self.thread.retire).atexit = False

    def prepare(
        self, prompt: Prompt, params: SamplingParams, priority: int, timeout_s: float | None
    ) -> list[Output]:
        """Requests that are ready to be queued, one for each output that is to be drawn.

        Raises `RequestError` if they cannot be served, and what `LoopThread.check` raises.
        """
        self.thread.check(params.num_outputs)
        priority, ends_s = checked_priority(priority), deadline_s(timeout_s)
        token_ids = self._token_ids(prompt)
        max_tokens = self._admission.max_tokens(token_ids, params)
        prompt_text = ""
        if params.echo:
            prompt_text = prompt if isinstance(prompt, str) else self.tokenizer.decode(token_ids)
        return [
            Output(
                Request(
                    id=next(self._ids),
                    params=choice,
                    max_tokens=max_tokens,
                    num_prompt=len(token_ids),
                    token_ids=list(token_ids),
                    priority=priority,
                    deadline_s=ends_s,
                    text=self._output_text(token_ids, choice),
                    constraint=self._constraint(choice),
                ),
                prompt_text,
            )
            for choice in params.choices()
        ]

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


class Loaded:
    """What both engines show of their bundle."""

    def __init__(self, bundle: str | Path, options: EngineOptions = EngineOptions()) -> None:
        """Check and load `bundle`; raises `BundleError` or `ConfigError` with the remedy."""
        self._core = Core(bundle, options)

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self._core.manifest

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer."""
        return self._core.tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self._core.max_length

    def stats(self) -> EngineStats:
        """Counters since loading, as of the last step; does not wait for the one that runs."""
        return self._core.thread.stats()


def single(params: SamplingParams | None) -> SamplingParams:
    """Parameters of one output; raises `RequestError` where they ask for several."""
    params = params or SamplingParams()
    if params.num_outputs > 1:
        raise RequestError(
            f"{'best_of' if params.best_of else 'n'} is {params.num_outputs}, but `submit` "
            "gives one output. Use `submit_many`."
        )
    return params
