"""How requests arrive: from clients that wait for their answers, or at random times."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import inf
from typing import ClassVar, Protocol

import numpy as np

from specexport.bench.clients import Clients, Delivery, Job, Trace, running
from specexport.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Run:
    """One variant under one load, once; rates are counted between `start_s` and `end_s`."""

    start_s: float
    end_s: float
    traces: tuple[Trace, ...]
    """Of the measured requests, in the order of the workload."""
    deliveries: tuple[Delivery, ...]
    """Of whatever ran."""
    finishes_s: tuple[float, ...]


class Load(Protocol):
    """A way for requests to arrive."""

    kind: ClassVar[str]
    axis: ClassVar[str]
    """What `amount` counts, for people."""

    @property
    def amount(self) -> float:
        """How heavy the load is."""
        ...

    @property
    def num_slots(self) -> int:
        """Requests that the engine shall run at once."""
        ...

    async def drive(
        self, clients: Clients, jobs: Sequence[Job], on_finish: Callable[[], None]
    ) -> Run:
        """Warm the engine up, then serve `jobs`; raises what a request raises."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients at once, each of which sends a request when its last one has ended."""

    kind: ClassVar[str] = "closed-loop"
    axis: ClassVar[str] = "requests at once"
    num_clients: int

    @property
    def amount(self) -> float:
        """The number of clients."""
        return self.num_clients

    @property
    def num_slots(self) -> int:
        """One for each client: nobody waits for a slot."""
        return self.num_clients

    async def drive(
        self, clients: Clients, jobs: Sequence[Job], on_finish: Callable[[], None]
    ) -> Run:
        """Rates count from the first job's start to the last one's end, all clients being busy."""
        return await _ClosedRun(clients, jobs, on_finish, self.num_clients).run()


class _ClosedRun:
    """Before and after the jobs, clients keep the load up with requests that do not count."""

    def __init__(
        self,
        clients: Clients,
        jobs: Sequence[Job],
        on_finish: Callable[[], None],
        num_clients: int,
    ) -> None:
        self._clients, self._jobs, self._on_finish = clients, jobs, on_finish
        self._num_clients = num_clients
        self._left = deque(enumerate(jobs))
        self._uncounted = _uncounted(jobs)
        self._traces: dict[int, Trace] = {}

    async def run(self) -> Run:
        async with running(self._client(number) for number in range(self._num_clients)) as tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        traces = [self._traces[index] for index in range(len(self._jobs))]
        return _run(self._clients, traces)

    async def _client(self, number: int) -> None:
        await self._clients.serve(self._warm_up(number))
        while len(self._traces) < len(self._jobs):
            if self._left:
                await self._measure(*self._left.popleft())
            else:
                await self._clients.serve(next(self._uncounted))

    def _warm_up(self, number: int) -> Job:
        """Of another length for each client, so that they do not go on in step."""
        job = next(self._uncounted)
        max_tokens = -(-(job.params.max_tokens or 1) * (number + 1) // self._num_clients)
        return replace(job, params=replace(job.params, max_tokens=max_tokens))

    async def _measure(self, index: int, job: Job) -> None:
        self._traces[index] = await self._clients.serve(job)
        self._on_finish()


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Requests that come at random times, whether or not earlier ones have ended."""

    kind: ClassVar[str] = "poisson"
    axis: ClassVar[str] = "arriving requests/s"
    rate_per_s: float
    num_slots: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < inf:
            raise ConfigError(
                f"The rate of arrivals is {self.rate_per_s:g} requests/s; it must be a number "
                "above 0."
            )

    @property
    def amount(self) -> float:
        """The mean rate."""
        return self.rate_per_s

    def offsets_s(self, num_requests: int) -> list[float]:
        """When requests arrive, counted from the first; the same for the same seed."""
        gaps_s = np.random.default_rng(self.seed).exponential(1 / self.rate_per_s, num_requests)
        gaps_s[:1] = 0
        offsets_s: list[float] = np.cumsum(gaps_s).tolist()
        return offsets_s

    async def drive(
        self, clients: Clients, jobs: Sequence[Job], on_finish: Callable[[], None]
    ) -> Run:
        """Rates count from the first arrival to the last end."""
        warm_up = islice(_uncounted(jobs), self.num_slots)
        async with running(clients.serve(job) for job in warm_up) as tasks:
            await asyncio.gather(*tasks)
        start_s = clients.now_s()

        async def serve(offset_s: float, job: Job) -> Trace:
            trace = await clients.serve_at(start_s + offset_s, job)
            on_finish()
            return trace

        arrivals = zip(self.offsets_s(len(jobs)), jobs, strict=True)
        async with running(serve(offset_s, job) for offset_s, job in arrivals) as tasks:
            return _run(clients, await asyncio.gather(*tasks))


def _uncounted(jobs: Sequence[Job]) -> Iterator[Job]:
    """Requests of the same kind that do not count: the last jobs first, without end."""
    return cycle(reversed(jobs))


def _run(clients: Clients, traces: Sequence[Trace]) -> Run:
    return Run(
        min(trace.arrived_s for trace in traces),
        max(trace.finished_s for trace in traces),
        tuple(traces),
        tuple(clients.deliveries),
        tuple(clients.finishes_s),
    )
