"""Trainings of a few steps, and their end at any moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specexport.training.options import TrainOptions
from specexport.training.progress import Progress
from specexport.training.report import TrainReport
from specexport.training.run import TrainTask, train_head

V_DRAFT = 200


def options(**values: Any) -> TrainOptions:
    given = {
        "method": "eagle3",
        "steps": 12,
        "batch_tokens": 256,
        "draft_vocab_size": V_DRAFT,
        "num_draft_steps": 3,
        "learning_rate": 1e-2,
        "num_warmup": 5,
        "save_every": 2,
    }
    return TrainOptions(**{**given, **values})


def train(
    cycle: Path,
    out: Path,
    chosen: TrainOptions,
    *,
    resume: bool = False,
    head: Path | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> TrainReport:
    torch.set_num_threads(1)
    task = TrainTask(str(cycle / "target"), cycle / "data", out, chosen, "fp32", resume, head)
    return train_head(task, watch, lambda text: None)


class Killed(Exception):
    """Ends a training in the middle of a step's end."""


def kill_after(step: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.step == step:
            raise Killed

    return watch
