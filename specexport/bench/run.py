"""All of `bench`: every variant under every load, in turn, over several rounds."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from specexport.bench.clients import BenchEngine, Clients
from specexport.bench.load import Load
from specexport.bench.plan import Plan, Variant
from specexport.bench.results import LoadResult, Measured
from specexport.runtime.options import EngineOptions

OpenEngine = Callable[[EngineOptions], BenchEngine]
Progress = Callable[[str, int], None]
"""Told what is done now, and how many measured requests have ended since."""


async def bench(
    plan: Plan,
    open_engine: OpenEngine,
    progress: Progress,
    now_s: Callable[[], float] = time.perf_counter,
) -> list[LoadResult]:
    """Measure; what a variant raises on loading is raised before anything is measured."""
    return await _Bench(plan, open_engine, progress, now_s).run()


class _Bench:
    """One engine is loaded at a time, so that a bundle needs the memory of one."""

    def __init__(
        self,
        plan: Plan,
        open_engine: OpenEngine,
        progress: Progress,
        now_s: Callable[[], float],
    ) -> None:
        self._plan, self._open_engine = plan, open_engine
        self._progress, self._now_s = progress, now_s

    async def run(self) -> list[LoadResult]:
        await self._check()
        return [await self._under(load) for load in self._plan.loads]

    async def _check(self) -> None:
        """Load each variant once: its options fit, files are whole, adaptive knows its costs."""
        num_slots = max(load.num_slots for load in self._plan.loads)
        for index, variant in enumerate(self._plan.variants):
            self._progress(f"loading, {variant.name}", 0)
            options = replace(variant.options, verify_files=index == 0)
            async with self._loaded(options, num_slots):
                pass

    async def _under(self, load: Load) -> LoadResult:
        rounds = [await self._round(load, index) for index in range(self._plan.num_rounds)]
        return LoadResult.of(load, [variant.name for variant in self._plan.variants], rounds)

    async def _round(self, load: Load, index: int) -> list[Measured]:
        """Every variant once, in its order."""
        what = f"{load.amount:g} {load.axis}, round {index + 1} of {self._plan.num_rounds}"
        # There and back again: a machine that slows down favours nobody.
        variants = self._plan.variants[:: -1 if index % 2 else 1]
        measured = {v.name: await self._measure(load, v, f"{what}, {v.name}") for v in variants}
        return [measured[variant.name] for variant in self._plan.variants]

    async def _measure(self, load: Load, variant: Variant, what: str) -> Measured:
        self._progress(what, 0)
        async with self._loaded(variant.options, load.num_slots) as engine:
            run = await load.drive(
                Clients(engine, self._now_s), self._plan.jobs, partial(self._progress, what, 1)
            )
            return Measured.of(run, is_lossless=engine.stats().is_lossless)

    @asynccontextmanager
    async def _loaded(self, options: EngineOptions, num_slots: int) -> AsyncIterator[BenchEngine]:
        max_waiting = max(len(self._plan.jobs), options.max_waiting)
        engine = self._open_engine(replace(options, max_slots=num_slots, max_waiting=max_waiting))
        try:
            yield engine
        finally:
            await engine.close()
