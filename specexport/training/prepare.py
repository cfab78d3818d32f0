"""Prompts that `train` is given → the data set beside its head."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specexport.errors import ConfigError
from specexport.export.parts import ModelSource
from specexport.training.answers import AnswerLimits
from specexport.training.collect import CollectOptions, collect_answers
from specexport.training.dataset import DataOptions, make_dataset, taps_for
from specexport.training.identity import find_checkpoint
from specexport.training.progress import STATE_NAME
from specexport.training.samples import SPEC_NAME


@dataclass(frozen=True, slots=True)
class DataSource:
    """What `train` learns from: one data set, or prompts that the target answers first."""

    paths: tuple[Path, ...]
    """The folder of a data set, or files of prompts."""
    num_self_made: int = 0
    """Prompts that the target writes itself."""
    answer_tokens: int | None = None
    """Of all answers together; None answers every prompt."""
    budget_bytes: int | None = None
    """Of the states; None keeps all."""
    num_threads: int = 0

    def __post_init__(self) -> None:
        if not self.paths and not self.num_self_made:
            raise ConfigError(
                "There is nothing to learn from: give --data a data set or files of prompts, or "
                "--self-made a number of prompts."
            )
        if missing := [path for path in self.paths if not path.exists()]:
            raise ConfigError(f"--data names {missing[0]}, which does not exist.")
        folders = [path for path in self.paths if path.is_dir()]
        if folders and len(self.paths) > 1:
            raise ConfigError(
                f"--data names the data set {folders[0]} and something else. Give one data set, or "
                "files of prompts alone; specexport data adds prompts to a data set."
            )
        if folders and (self.num_self_made or self.answer_tokens or self.budget_bytes):
            raise ConfigError(
                f"--self-made, --answer-tokens and --data-budget say what data to make, and "
                f"{folders[0]} holds data. Leave them out, or give specexport data them."
            )

    @property
    def data_set(self) -> Path | None:
        """The folder that was given; None where prompts were."""
        return next((path for path in self.paths if path.is_dir()), None)


def prepare_data(
    target: str, method: str, source: DataSource, out: Path, tell: Callable[[str], None]
) -> Path:
    """The folder of the data set: the one given, or `out`-data, made for `method` alone.

    What a killed run has made of it is gone on with. Raises as `collect_answers` and
    `make_dataset` do, and `ConfigError` where several processes would make it at once.
    """
    if source.data_set is not None:
        return source.data_set
    folder = out.absolute().with_name(f"{out.absolute().name}-data")
    if (out / STATE_NAME).is_file() and (folder / SPEC_NAME).is_file():
        tell(f"The training was begun with the data set {folder}, which is taken as it is.")
        return folder
    if is_one_of_several():
        raise ConfigError(
            "Several processes cannot make one data set. Make it first with specexport data, and "
            "give --data its folder."
        )
    config = ModelSource.open(find_checkpoint(target), "target").config
    max_tokens = min(AnswerLimits().max_tokens, config.context_length // 2)
    collect = CollectOptions(
        prompts=source.paths,
        num_self_made=source.num_self_made,
        limits=AnswerLimits(max_tokens, source.answer_tokens),
        num_threads=source.num_threads,
    )
    tell(f"Data: the target answers, and its states go to {folder}.")
    answers = collect_answers(target, folder, collect, tell)
    options = DataOptions(
        taps=taps_for([method], config.num_layers),
        budget_bytes=source.budget_bytes,
        num_threads=source.num_threads,
    )
    spec = make_dataset(target, answers, folder, options, tell)
    tell(f"Data: {sum(spec.recipe.sources.values())} texts, {spec.num_answer_tokens} answer tokens")
    return folder


def is_one_of_several() -> bool:
    """True in a training that `accelerate launch` runs as several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
