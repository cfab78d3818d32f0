"""`training.json`: what was trained, and what came of it."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from specexport.training.disk import write_whole
from specexport.training.options import TrainOptions
from specexport.training.progress import Point

REPORT_NAME = "training.json"


class Trial(BaseModel):
    """What the built head gained on this machine: held-out prompts one after the other, greedy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_draft_tokens: int
    """The draft length that promised most, by what steps cost here."""
    predicted_speed_up: float
    """What it promised, in times plain decoding."""
    plain_tokens_per_s: float
    fixed_tokens_per_s: float
    """With drafts as the bundle has them."""
    adaptive_tokens_per_s: float
    """With drafts as long as they pay, which is how a bundle runs by default."""
    fixed_speed_up: float
    """Measured, in times plain decoding in the same round: the median of the rounds."""
    adaptive_speed_up: float
    acceptance_length: float
    """Of the fixed drafts."""
    num_prompts: int
    num_different: int
    """Outputs that were not those of plain decoding."""


class TrainReport(BaseModel):
    """The whole of `training.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: TrainOptions
    target: str
    head: str | None = None
    """The head that it began from."""
    data_sha256: str
    """Of the data set's `dataset.json`."""
    num_parameters: int
    draft_vocab_size: int
    vocabulary_coverage: float
    """The share of the held-out answers' tokens that the head can say."""
    num_steps: int
    best_step: int
    num_tokens_seen: int
    elapsed_s: float
    acceptance_rates: tuple[float, ...]
    """By draft position, on all held-out texts."""
    acceptance_length: float
    num_drafts: int
    points: tuple[Point, ...]
    trial: Trial | None = None
    """None where nothing was measured."""

    def write(self, folder: Path) -> None:
        """Into the folder of a head, whole."""
        write_whole(folder / REPORT_NAME, (self.model_dump_json(indent=2) + "\n").encode())
