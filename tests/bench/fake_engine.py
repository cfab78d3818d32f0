"""An engine that keeps to a timetable."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from specexport.bench.clients import Job
from specexport.runtime.drafters.base import NoDrafter
from specexport.runtime.loop import SpeculativeLoop
from specexport.runtime.options import EngineOptions
from specexport.runtime.output import Chunk, Completion
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason
from specexport.runtime.stats import EngineStats, RequestStats
from tests.hash_engine import HashEngine


@dataclass(frozen=True)
class Pace:
    """Submitting takes a while, then the first token, then each chunk."""

    submit_s: float = 0.0
    first_s: float = 1.0
    step_s: float = 0.5
    chunk_tokens: int = 1
    draft_tokens: int = 0


@dataclass
class FakeEngine:
    """Every request has a clock of its own; its output is its prompt, again and again."""

    pace: Pace = Pace()
    wrong: int | None = None
    """Requests with this token in the prompt give another output."""
    bad: int | None = None
    """Requests with this token in the prompt fail."""
    options: EngineOptions = EngineOptions()
    num_running: int = 0
    submitted: list[tuple[int, ...]] = field(default_factory=list)
    is_closed: bool = False

    async def submit(self, prompt: tuple[int, ...], params: SamplingParams) -> "FakeStream":
        await asyncio.sleep(self.pace.submit_s)
        self.submitted.append(prompt)
        return FakeStream(self, Job(prompt, params))

    def stats(self) -> EngineStats:
        return SpeculativeLoop(HashEngine(), NoDrafter(), 0, []).stats()

    async def close(self) -> None:
        self.is_closed = True


class FakeStream:
    def __init__(self, engine: FakeEngine, job: Job) -> None:
        self._engine, self._prompt = engine, job.prompt_ids
        ids = [job.prompt_ids[i % len(job.prompt_ids)] for i in range(job.params.max_tokens or 0)]
        if engine.wrong in job.prompt_ids:
            ids[-1] += 1
        step = engine.pace.chunk_tokens
        rest = [tuple(ids[start : start + step]) for start in range(1, len(ids), step)]
        self._chunks = [tuple(ids[:1]), *rest]

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        pace = self._engine.pace
        self._engine.num_running += 1
        try:
            await asyncio.sleep(pace.first_s)
            if self._engine.bad in self._prompt:
                raise RuntimeError("the request failed")
            yield Chunk("", self._chunks[0])
            for chunk in self._chunks[1:]:
                await asyncio.sleep(pace.step_s)
                yield Chunk("", chunk)
        finally:
            self._engine.num_running -= 1

    async def result(self) -> Completion:
        stats = RequestStats(num_decode_steps=len(self._chunks) - 1)
        for chunk in self._chunks[1:]:
            num_drafted = self._engine.pace.draft_tokens
            stats.acceptance.record(num_drafted, len(chunk) - 1, num_drafted)
        token_ids = tuple(token_id for chunk in self._chunks for token_id in chunk)
        return Completion("", token_ids, FinishReason.LENGTH, stats)


class FakeFactory:
    """Opens engines and keeps them; drafting makes them faster, by the paces given."""

    def __init__(self, fixed: FakeEngine, adaptive: FakeEngine, off: FakeEngine) -> None:
        self._kinds = {"fixed": fixed, "adaptive": adaptive, "off": off}
        self.opened: list[FakeEngine] = []

    def __call__(self, options: EngineOptions) -> FakeEngine:
        assert all(engine.is_closed for engine in self.opened), "two engines at once"
        kind = self._kinds[kind_of(options)]
        self.opened.append(replace(kind, options=options, submitted=[]))
        return self.opened[-1]


def kind_of(options: EngineOptions) -> str:
    """The variant that has these options."""
    if options.method == "none":
        return "off"
    return "adaptive" if options.adaptive else "fixed"
