"""What the benchmark needs of an engine, and the clients that send requests to it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from specexport.runtime.output import Chunk, Completion
from specexport.runtime.params import SamplingParams
from specexport.runtime.stats import EngineStats

T = TypeVar("T")


class BenchStream(Protocol):
    """The output of one request."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come."""
        ...

    async def result(self) -> Completion:
        """The whole output, once it has ended."""
        ...


class BenchEngine(Protocol):
    """A loaded bundle that runs by itself."""

    async def submit(self, prompt: tuple[int, ...], params: SamplingParams) -> BenchStream:
        """Queue a request."""
        ...

    def stats(self) -> EngineStats:
        """Counters since loading."""
        ...

    async def close(self) -> None:
        """Cancel what runs and free the bundle."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Delivery:
    """Tokens that came together, and when."""

    time_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a client saw of one request; times in seconds of the clients' clock."""

    job: Job
    arrived_s: float
    """When it was sent, or should have been."""
    deliveries: tuple[Delivery, ...]
    finished_s: float
    completion: Completion


class Clients:
    """Send requests to one engine and write down when tokens come."""

    def __init__(self, engine: BenchEngine, now_s: Callable[[], float]) -> None:
        """`now_s` is the clock of all times."""
        self._engine = engine
        self.now_s = now_s
        self.deliveries: list[Delivery] = []
        """Of all requests so far, unfinished ones included."""
        self.finishes_s: list[float] = []
        """When requests ended."""

    async def serve(self, job: Job) -> Trace:
        """Send a request now and wait for its end."""
        return await self.serve_at(self.now_s(), job)

    async def serve_at(self, arrival_s: float, job: Job) -> Trace:
        """Wait until `arrival_s`, send a request and wait for its end."""
        await asyncio.sleep(max(arrival_s - self.now_s(), 0))
        deliveries = []
        stream = await self._engine.submit(job.prompt_ids, job.params)
        async for chunk in stream:
            if chunk.token_ids:
                deliveries.append(Delivery(self.now_s(), len(chunk.token_ids)))
                self.deliveries.append(deliveries[-1])
        finished_s = self.now_s()
        self.finishes_s.append(finished_s)
        return Trace(job, arrival_s, tuple(deliveries), finished_s, await stream.result())


@asynccontextmanager
async def running(
    coroutines: Iterable[Coroutine[Any, Any, T]],
) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Tasks that are cancelled and gone when the block ends, however it ends."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
