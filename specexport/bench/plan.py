"""What is measured: variants, loads and requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specexport.bench.clients import Job
from specexport.bench.load import Load
from specexport.bench.prompts import encode_prompts, read_prompts, shipped_prompts
from specexport.engines.available import EngineName
from specexport.errors import ConfigError
from specexport.export.manifest import Manifest
from specexport.runtime.options import EngineOptions, MethodName
from specexport.runtime.params import SamplingParams
from specexport.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user chooses, beside the loads."""

    num_requests: int
    """Measured requests of each variant under each load in each round."""
    max_tokens: int
    temperature: float
    num_rounds: int
    seed: int
    """Of the order of prompts, the arrival times and sampled outputs."""
    num_threads: int
    engine: EngineName
    method: MethodName | None
    """None: the bundle's."""
    draft_lengths: tuple[int, ...]
    """Empty: the bundle's."""
    prompts: Path | None
    """None: those that ship with specexport."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the bundle."""

    name: str
    options: EngineOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is measured; the first variant is what the others are compared with."""

    variants: tuple[Variant, ...]
    loads: tuple[Load, ...]
    jobs: tuple[Job, ...]
    num_rounds: int

    @property
    def mean_prompt_tokens(self) -> float:
        """Of the requests of a round."""
        return sum(len(job.prompt_ids) for job in self.jobs) / len(self.jobs)

    @property
    def num_requests(self) -> int:
        """Measured requests in all."""
        return len(self.variants) * len(self.loads) * len(self.jobs) * self.num_rounds


def make_plan(bundle: Path, manifest: Manifest, loads: Sequence[Load], settings: Settings) -> Plan:
    """Everything but the engines; raises `ConfigError` for what cannot be measured."""
    if manifest.method.kind == "none" and settings.method is None:
        raise ConfigError(
            f"{bundle} was built without a drafting method, so there is nothing to compare. "
            "Choose --method ngram or suffix, which need nothing built."
        )
    prompts = encode_prompts(
        read_prompts(settings.prompts) if settings.prompts else shipped_prompts(),
        Tokenizer(bundle / "tokenizer"),
        manifest.target.max_length - settings.max_tokens,
    )
    jobs = make_jobs(prompts, settings)
    return Plan(make_variants(settings), tuple(loads), jobs, settings.num_rounds)


def make_variants(settings: Settings) -> tuple[Variant, ...]:
    """Off; each draft length, or the bundle's own; adaptive up to the longest of these."""
    # Prompts come again and again: what the prefix cache would make of that is not their time.
    base = EngineOptions(
        engine=settings.engine,
        num_threads=settings.num_threads,
        prefix_cache_mb=0,
        verify_files=False,
    )
    drafting, lengths = replace(base, method=settings.method), settings.draft_lengths
    steady = replace(drafting, adaptive=False)
    fixed = [Variant(f"K={k}", replace(steady, num_speculative_tokens=k)) for k in lengths]
    longest = replace(drafting, num_speculative_tokens=max(lengths, default=None))
    return (
        Variant("off", replace(base, method="none")),
        *(fixed or [Variant("fixed", steady)]),
        Variant("adaptive", replace(longest, adaptive=True)),
    )


def make_jobs(prompts: Sequence[tuple[int, ...]], settings: Settings) -> tuple[Job, ...]:
    """The prompts in random order, over and over again; each request has a seed of its own."""
    order = np.random.default_rng(settings.seed).permutation(len(prompts)).tolist()
    return tuple(
        Job(
            prompts[order[index % len(order)]],
            SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=settings.seed + index,
            ),
        )
        for index in range(settings.num_requests)
    )
