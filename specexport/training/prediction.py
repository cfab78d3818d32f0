"""What a head would gain on this machine, by what steps cost here."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from specexport.export.manifest import Manifest
from specexport.runtime.costs import StepCosts
from specexport.training.report import TrainReport


@dataclass(frozen=True, slots=True)
class Prediction:
    """The draft length that promises most, and how many times as fast as plain decoding it is."""

    num_draft_tokens: int
    speed_up: float


def predict(manifest: Manifest, costs: Mapping[str, StepCosts], report: TrainReport) -> Prediction:
    """For a bundle with the head whose `report` it is; `costs` are those of its graphs, by path."""
    target, graphs = costs[manifest.target.path], manifest.graphs
    head_s = costs[graphs["medusa" if "medusa" in graphs else "head"].path].step_s(1, 1, 0)
    reached: list[float] = list(accumulate(report.acceptance_rates, mul))

    def speed_up(k: int) -> float:
        num_head_steps = 1 if "medusa" in graphs else k  # all of Medusa's heads at once
        seconds = target.step_s(1, k + 1, 0) + num_head_steps * head_s
        return (1 + sum(reached[:k])) * target.step_s(1, 1, 0) / seconds

    options = [Prediction(k, speed_up(k)) for k in range(1, len(reached) + 1)]
    return max(options, key=lambda option: option.speed_up)
