"""How far a training is, and the file that it is gone on from after a kill."""

import io
import math
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from specexport.errors import ConfigError
from specexport.training.disk import write_whole
from specexport.training.evaluate import Acceptance

STATE_NAME = "training-state.pt"


class Point(BaseModel):
    """One look at the held-out texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    elapsed_s: float
    loss: float | None
    """Of the steps since the last look, all draft positions."""
    held_out_loss: float
    """Of the first draft position."""
    rates: tuple[float, ...]
    """Acceptance by draft position."""
    length: float
    """Expected tokens of a step, the target's own included."""


class Progress(BaseModel):
    """What changes from step to step, but for weights and the optimizer."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    total_steps: int | None = None
    """None: not measured yet."""
    elapsed_s: float = 0.0
    num_tokens: int = 0
    """Tokens of answers that were learned from, repeats included."""
    loss_sum: float = 0.0
    loss_count: int = 0
    num_worse: int = 0
    """Looks since the best one."""
    points: list[Point] = []

    @property
    def best(self) -> Point:
        """The look with the longest expected step; among equals the one with the least loss."""
        return max(self.points, key=_merit)

    def add(self, found: Acceptance) -> None:
        """Take in a look."""
        point = Point(
            step=self.step,
            elapsed_s=self.elapsed_s,
            loss=self.loss_sum / self.loss_count if self.loss_count else None,
            held_out_loss=found.loss,
            rates=found.rates,
            length=found.length,
        )
        is_better = not self.points or _merit(point) > _merit(self.best)
        self.num_worse = 0 if is_better else self.num_worse + 1
        self.points.append(point)
        self.loss_sum, self.loss_count = 0.0, 0

    def is_look_due(self, num_looks: int) -> bool:
        """So many looks after the first, evenly over the steps; the last after the last step."""
        if self.total_steps is None:
            return False
        is_last = self.step == self.total_steps
        return is_last or self.step * num_looks // self.total_steps >= len(self.points)

    def is_over(self, patience: int) -> bool:
        """All steps are done, or nothing has got better for as many looks."""
        return self.step >= (self.total_steps or math.inf) or self.num_worse >= patience


def _merit(point: Point) -> tuple[float, float]:
    return point.length, -point.held_out_loss


class SavedState(BaseModel):
    """A training between two steps."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    run: dict[str, Any]
    """What it trains, and how: another run cannot go on from here."""
    progress: Progress
    weights: dict[str, torch.Tensor]
    best_weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Whole, or not at all."""
        buffer = io.BytesIO()
        torch.save({**dict(self), "progress": self.progress.model_dump_json()}, buffer)
        write_whole(folder / STATE_NAME, buffer.getvalue())


def read_state(folder: Path, run: dict[str, Any]) -> SavedState | None:
    """The state in `folder`, if there is one; raises `ConfigError` unless it is of the same run."""
    path = folder / STATE_NAME
    if not path.is_file():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        progress = Progress.model_validate_json(found.pop("progress"))
        state = SavedState(progress=progress, **found)
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is damaged ({reason}). Remove it to train from the start."
        ) from None
    for key, value in run.items():
        if (saved := state.run.get(key)) != value:
            raise ConfigError(
                f"The training in {folder} was begun with {key} {saved!r}; now it is {value!r}. "
                "Give the same again, or another --out."
            )
    return state
