"""A target, a data set and options → the folder of a trained head."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specexport.errors import ConfigError
from specexport.export.manifest import FINAL_NORM, FloatType
from specexport.training.drafter import Drafter
from specexport.training.head_files import WEIGHTS_NAME, HeadFiles
from specexport.training.head_start import HeadStart, column_scale
from specexport.training.identity import require_same
from specexport.training.lender import Lender, read_lender
from specexport.training.linear_start import Columns, fit_linear
from specexport.training.loop import Trainer, Watch
from specexport.training.methods import METHODS
from specexport.training.options import TrainOptions
from specexport.training.progress import STATE_NAME, read_state
from specexport.training.report import TrainReport
from specexport.training.samples import SPEC_NAME, Dataset
from specexport.training.step_drafter import StepDrafter
from specexport.training.training_data import TrainingData
from specexport.training.vocabulary import choose_vocabulary

_SCALE_TEXTS = 16
_MAY_DIFFER = {"draft_vocab_size", "truncated_vocab_size", "max_position_embeddings"}
"""Between the config of a head and of the one that begins from it."""


@dataclass(frozen=True, slots=True)
class TrainTask:
    """What to train on what, and where to."""

    target: str
    data: Path
    out: Path
    options: TrainOptions
    float_type: FloatType = "bf16"
    """Of the tensors that are written."""
    resume: bool = False
    head: Path | None = None
    """The folder of a head to begin from."""


def train_head(task: TrainTask, watch: Watch, say: Callable[[str], None]) -> TrainReport:
    """Train to the end and write the head; what a killed run did is gone on from with `resume`."""
    check_out(task.out, resume=task.resume)
    begin = HeadFiles.read(task.head) if task.head else None
    dataset = Dataset.open(task.data)
    run = {
        **task.options.model_dump(),
        "data": _sha256(task.data / SPEC_NAME),
        "head": _sha256(task.head / WEIGHTS_NAME) if task.head else None,
    }
    state = read_state(task.out, run) if task.resume else None
    target = read_lender(task.target)
    require_same(dataset.spec.identity, target.identity, f"The data set {task.data}")
    _check_splits(dataset)
    start, data = _start(dataset, target, task.options)
    say(
        f"Draft vocabulary: {len(start.vocabulary)} of {target.config.vocab_size} tokens, "
        f"{start.vocabulary.coverage:.1%} of those in held-out answers."
    )
    torch.manual_seed(task.options.seed)
    drafter = METHODS[task.options.method].make(target, start)
    if state is None and begin is not None:
        _go_on(drafter, begin)
    elif state is None and isinstance(drafter, StepDrafter):
        _begin(drafter, dataset, data, target)
    trainer = Trainer(
        drafter, torch.from_numpy(start.vocabulary.draft_ids), data, task.options.precision
    )
    if state is not None:
        trainer.restore(state)
        say(f"Going on after step {state.progress.step}.")
    task.out.mkdir(parents=True, exist_ok=True)
    trainer.run(task.options, lambda: trainer.save(task.out, run), watch)
    report = _report(task, run, start, trainer)
    if trainer.is_main_process:
        drafter.files().write(task.out, task.float_type)
        report.write(task.out)
        for left in task.out.glob(f"*{STATE_NAME}*"):
            left.unlink()
    return report


def check_out(out: Path, *, resume: bool) -> None:
    """Raise `ConfigError` where a head cannot be written to `out`, or would replace something."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"The folder {out.parent} does not exist. Make it, or change --out.")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file. Name a folder with --out.")
    if (out / STATE_NAME).is_file() and not resume:
        raise ConfigError(
            f"{out} holds a training that has not ended. Give --resume to go on, or another --out."
        )
    # A hidden file is what a kill left of one that was being written.
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    if STATE_NAME not in names and any(not name.startswith(".") for name in names):
        raise ConfigError(f"{out} is not empty. Name another folder with --out.")


def _check_splits(dataset: Dataset) -> None:
    for split in ("train", "held_out"):
        if not dataset.split(split):
            raise ConfigError(
                f"The data set {dataset.folder} has no {split} texts. Make it of more prompts."
            )


def _start(
    dataset: Dataset, target: Lender, options: TrainOptions
) -> tuple[HeadStart, TrainingData]:
    taps = METHODS[options.method].taps(dataset.spec.taps)
    columns = dataset.spec.columns(taps)
    train, held_out = dataset.split("train"), dataset.split("held_out")
    size = target.config.vocab_size
    vocabulary = choose_vocabulary(
        (dataset[i] for i in train),
        (dataset[i] for i in held_out),
        min(options.draft_vocab_size or size, size),
        size,
    )
    scale = column_scale(dataset[i].states[:, columns] for i in train[:_SCALE_TEXTS])
    start = HeadStart(
        taps=taps,
        vocabulary=vocabulary,
        scale=scale,
        max_position=max(dataset.lengths) + options.num_draft_steps,
        num_draft_steps=options.num_draft_steps,
        is_tied=options.tied_lm_head,
    )
    data = TrainingData(
        dataset, columns, options.num_draft_steps, options.batch_tokens, options.long_share
    )
    return start, data


def _go_on(drafter: Drafter, begin: HeadFiles) -> None:
    """From a head that was written."""
    for key, value in drafter.files().config.items():
        if key not in _MAY_DIFFER and (found := begin.config.get(key)) != value:
            raise ConfigError(
                f"The head to begin from has {key} {found!r}, and this one {value!r}. Take one of "
                "the same method, target and options."
            )
    drafter.take(begin.tensors)


def _begin(drafter: StepDrafter, dataset: Dataset, data: TrainingData, target: Lender) -> None:
    """From the best linear guess."""
    columns = Columns(list(data.columns), dataset.spec.columns((FINAL_NORM,)))
    samples = (dataset[i] for i in dataset.split("train"))
    drafter.begin(fit_linear(samples, columns, drafter.linear_inputs, target.final_norm))


def _report(
    task: TrainTask, run: dict[str, Any], start: HeadStart, trainer: Trainer
) -> TrainReport:
    found, progress = trainer.final_acceptance(), trainer.progress
    return TrainReport(
        options=task.options,
        target=task.target,
        head=None if task.head is None else str(task.head),
        data_sha256=run["data"],
        num_parameters=sum(p.numel() for p in trainer.drafter.parameters()),
        draft_vocab_size=len(start.vocabulary),
        vocabulary_coverage=start.vocabulary.coverage,
        num_steps=progress.step,
        best_step=progress.best.step,
        num_tokens_seen=progress.num_tokens,
        elapsed_s=progress.elapsed_s,
        acceptance_rates=found.rates,
        acceptance_length=found.length,
        num_drafts=found.num_drafts,
        points=tuple(progress.points),
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
