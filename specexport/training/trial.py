"""What a head gains here: its bundle on held-out prompts, with and without speculation in turns."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from pydantic import TypeAdapter

from specexport.bench.load import ClosedLoop
from specexport.bench.plan import Plan, Settings, make_jobs, make_variants
from specexport.bench.results import LoadResult
from specexport.bench.run import bench
from specexport.errors import ConfigError
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import Manifest, read_manifest
from specexport.export.methods import Method
from specexport.runtime.async_engine import AsyncEngine
from specexport.runtime.tune import tune
from specexport.runtime.tuning import Tuning
from specexport.training.disk import scratch
from specexport.training.identity import find_checkpoint
from specexport.training.prediction import predict
from specexport.training.report import TrainReport, Trial
from specexport.training.run import TrainTask
from specexport.training.samples import Dataset, Sample

_MOST_TOKENS = 48
"""Of an answer."""
_ROUNDS = 2
_LEAST_PROMPTS, _MOST_PROMPTS = 2, 8
_BUDGET_S = 60.0
"""That decoding should take: a slow model answers fewer prompts."""


def check_bundle(bundle: Path) -> None:
    """Raise `ConfigError`, before a long training, where no bundle can be built at `bundle`."""
    if bundle.exists():
        raise ConfigError(f"{bundle} exists. Name another folder with --build.")
    if not bundle.absolute().parent.is_dir():
        raise ConfigError(f"The folder {bundle.parent} does not exist. Make it, or change --build.")


@contextmanager
def built(task: TrainTask, bundle: Path | None) -> Iterator[Path]:
    """The target with the head, as `build` makes it; at `bundle`, or inside `out` for a while."""
    head, source = str(task.out), find_checkpoint(task.target)
    kind = task.options.method
    method: Method = TypeAdapter(Method).validate_python({"kind": kind})
    options = BuildOptions(method, head=head)
    if bundle is not None:
        build(source, bundle, options)
        yield bundle
        return
    with scratch(task.out / ".bundle") as folder:
        build(source, folder, options)
        yield folder


def try_head(bundle: Path, data: Path, report: TrainReport, num_threads: int = 0) -> Trial:
    """Tune the bundle, predict by that, then measure; `num_threads` as in `EngineOptions`.

    Takes about a minute, and longer for a model of more than some 100 ms a token.
    """
    manifest, tuning = read_manifest(bundle), tune(bundle, num_threads)
    predicted = predict(manifest, tuning.costs, report)
    plan = _plan(manifest, tuning, data, num_threads)
    (found,) = asyncio.run(
        bench(plan, lambda options: AsyncEngine(bundle, options), lambda what, done: None)
    )
    return _trial(plan, found, predicted.num_draft_tokens, predicted.speed_up)


def _plan(manifest: Manifest, tuning: Tuning, data: Path, num_threads: int) -> Plan:
    max_tokens = min(_MOST_TOKENS, manifest.target.max_length // 2)
    settings = Settings(
        num_requests=1,
        max_tokens=max_tokens,
        temperature=0.0,
        num_rounds=_ROUNDS,
        seed=0,
        num_threads=num_threads,
        engine="onnxruntime",
        method=None,
        draft_lengths=(),
        prompts=None,
    )
    variants = make_variants(settings)
    step_s = tuning.costs[manifest.target.path].step_s(1, 1, 0)
    affordable = int(_BUDGET_S / (step_s * max_tokens * _ROUNDS * len(variants)))
    most = min(max(affordable, _LEAST_PROMPTS), _MOST_PROMPTS)
    room = manifest.target.max_length - max_tokens
    prompts = list(islice(_held_out_prompts(Dataset.open(data), room), most))
    jobs = make_jobs(prompts, replace(settings, num_requests=len(prompts)))
    return Plan(variants, (ClosedLoop(1),), jobs, _ROUNDS)


def _held_out_prompts(dataset: Dataset, room: int) -> Iterator[tuple[int, ...]]:
    """Of at most `room` tokens."""
    for number in dataset.split("held_out"):
        yield tuple(_prompt(dataset[number])[:room])


def _prompt(sample: Sample) -> list[int]:
    """What comes before the answer; of a text that was given, a quarter."""
    size = len(sample.token_ids)
    num_prompt = int((~sample.is_answer).sum()) or max(size // 4, 1)
    found: list[int] = sample.token_ids[:num_prompt].tolist()
    return found


def _trial(plan: Plan, found: LoadResult, num_draft_tokens: int, predicted: float) -> Trial:
    plain, fixed, adaptive = found.points
    return Trial(
        num_draft_tokens=num_draft_tokens,
        predicted_speed_up=predicted,
        plain_tokens_per_s=plain.figures.tokens_per_s,
        fixed_tokens_per_s=fixed.figures.tokens_per_s,
        adaptive_tokens_per_s=adaptive.figures.tokens_per_s,
        fixed_speed_up=fixed.speedup,
        adaptive_speed_up=adaptive.speedup,
        acceptance_length=fixed.drafting.acceptance.length,
        num_prompts=len(plan.jobs),
        num_different=max(fixed.num_different, adaptive.num_different),
    )
