"""`training.json`: what was trained, and what came of it."""

from pydantic import BaseModel, ConfigDict

from specexport.training.options import TrainOptions
from specexport.training.progress import Point

REPORT_NAME = "training.json"


class TrainReport(BaseModel):
    """The whole of `training.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: TrainOptions
    target: str
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
