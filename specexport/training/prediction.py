"""What a head would gain on this machine, by what steps cost here."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from specexport.engines.ort import describe_machine
from specexport.engines.ort_session import usable_cpus
from specexport.export.manifest import Manifest, read_manifest
from specexport.runtime.costs import StepCosts
from specexport.runtime.tuning import read_costs
from specexport.training.report import TrainReport


@dataclass(frozen=True, slots=True)
class Prediction:
    """The draft length that promises most, and how many times as fast as plain decoding it is."""

    num_draft_tokens: int
    speed_up: float


def predict(bundle: Path, report: TrainReport, num_threads: int = 0) -> Prediction | None:
    """From a bundle of the target that was tuned here; None for one that was not.

    A bundle with a head of this method says what drafts cost. Otherwise the figure is rough: a
    step of the head is taken to cost its share of the target's weights, which is what decoding
    spends its time on. `num_threads` as in `EngineOptions`.
    """
    manifest = read_manifest(bundle)
    costs = read_costs(bundle, describe_machine(num_threads or usable_cpus()))
    target = costs.get(manifest.target.path)
    if target is None:
        return None
    plain_s = target.step_s(1, 1, 0)
    reached = list(accumulate(report.acceptance_rates, mul))
    options = []
    for k in range(1, len(reached) + 1):
        step_s = target.step_s(1, k + 1, 0) + _draft_s(k, manifest, costs, report)
        options.append(Prediction(k, (1 + sum(reached[:k])) * plain_s / step_s))
    return max(options, key=lambda option: option.speed_up)


def _draft_s(
    num_tokens: int, manifest: Manifest, costs: Mapping[str, StepCosts], report: TrainReport
) -> float:
    """A draft of so many tokens: a step for each, but one for all of Medusa's heads."""
    own = [spec.path for name, spec in manifest.graphs.items() if name in ("head", "medusa")]
    if manifest.method.kind == report.options.method and own and own[0] in costs:
        num_steps = 1 if report.options.method == "medusa" else num_tokens
        return num_steps * costs[own[0]].step_s(1, 1, 0)
    share = report.num_parameters / manifest.target.num_parameters
    return num_tokens * share * costs[manifest.target.path].step_s(1, 1, 0)
