"""What a head would gain on this machine, before it is built: a rough figure, said to be one."""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from specexport.engines.ort import describe_machine
from specexport.engines.ort_session import usable_cpus
from specexport.export.manifest import read_manifest
from specexport.runtime.tuning import read_costs
from specexport.training.report import TrainReport


@dataclass(frozen=True, slots=True)
class Prediction:
    """The draft length that promises most, and how many times as fast as plain decoding it is."""

    num_draft_tokens: int
    speed_up: float


def predict(bundle: Path, report: TrainReport) -> Prediction | None:
    """From a bundle of the target that was tuned here; None for one that was not.

    A step of the head is taken to cost its share of the target's weights, which is what decoding
    spends its time on.
    """
    manifest = read_manifest(bundle)
    costs = read_costs(bundle, describe_machine(usable_cpus())).get(manifest.target.path)
    if costs is None:
        return None
    plain_s = costs.step_s(1, 1, 0)
    draft_s = plain_s * report.num_parameters / manifest.target.num_parameters
    reached = list(accumulate(report.acceptance_rates, mul))
    options = [
        Prediction(k, (1 + sum(reached[:k])) * plain_s / (costs.step_s(1, k + 1, 0) + k * draft_s))
        for k in range(1, len(reached) + 1)
    ]
    return max(options, key=lambda option: option.speed_up)
