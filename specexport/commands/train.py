"""`specexport train`."""

from pathlib import Path
from typing import get_args

import click

from specexport.commands.common import console
from specexport.commands.option_types import SizeType
from specexport.errors import ConfigError
from specexport.export.manifest import FloatType
from specexport.training.disk import write_whole
from specexport.training.methods import METHODS
from specexport.training.options import Precision, TrainOptions
from specexport.training.prepare import DataSource, is_one_of_several, prepare_data
from specexport.training.report import REPORT_NAME, TrainReport, Trial
from specexport.training.run import TrainTask, check_out, train_head
from specexport.training.trial import built, check_bundle, try_head
from specexport.training.view import watching

PLOT_NAME = "training.png"
_DEFAULTS = TrainOptions(method="eagle3")
_EPOCHS = 5.0
_EXAMPLES = """\b
Examples:
  specexport train model.gguf --method eagle3 --data prompts.jsonl -o head --build bundle
  specexport train model.gguf --method eagle3 --self-made 1000 --data notes.txt -o head
  specexport train ./Llama-3.1-8B-Instruct --method eagle3 --data dataset -o head --minutes 90
  specexport train model.gguf --method eagle3 --data dataset -o head --resume
"""


@click.command(epilog=_EXAMPLES)
@click.argument("target")
@click.option(
    "--method",
    type=click.Choice(list(METHODS)),
    default="eagle3",
    show_default=True,
    help="Kind of head.",
)
@click.option(
    "--data",
    "paths",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Files of prompts (text, JSON lines, chats) that TARGET answers first, into OUT-data; or "
    "a folder that specexport data made.",
)
@click.option(
    "--self-made",
    type=click.IntRange(1),
    default=None,
    help="So many prompts that TARGET writes itself, too.",
)
@click.option(
    "--answer-tokens",
    type=click.IntRange(1),
    help="Enough tokens of all answers together  [default: answer all prompts].",
)
@click.option(
    "--data-budget",
    type=SizeType(),
    help="Most bytes of states, such as 4GB; what does not fit is left out  [default: none].",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of the head; what `build --head` reads.",
)
@click.option("--steps", type=click.IntRange(1), help="Train for so many steps.")
@click.option(
    "--epochs",
    type=click.FloatRange(0, min_open=True),
    help="Or for so many passes over the data  [default: 5].",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help="Or for so long: the schedule is fitted to it by what steps take.",
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(1),
    default=32000,
    show_default=True,
    help="Tokens that the head can say: the most frequent ones of the answers.",
)
@click.option(
    "--draft-steps",
    type=click.IntRange(1, 16),
    default=_DEFAULTS.num_draft_steps,
    show_default=True,
    help="Draft positions that are learned.",
)
@click.option(
    "--lm-head",
    type=click.Choice(["tied", "own"]),
    help="Medusa: heads share the target's output matrix, or train one each  [default: tied].",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(1),
    default=_DEFAULTS.batch_tokens,
    show_default=True,
    help="Tokens of a step, prompts included.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default=_DEFAULTS.precision,
    show_default=True,
    help="Of products of matrices; bf16 is faster where the hardware multiplies it (GPUs, AMX).",
)
@click.option(
    "--head",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Begin from this head, of the same method and target, instead of from the start.",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    default=_DEFAULTS.learning_rate,
    show_default=True,
    help="At its highest.",
)
@click.option(
    "--patience",
    type=click.IntRange(1),
    default=_DEFAULTS.patience,
    show_default=True,
    help="End early after so many looks at held-out texts without a gain.",
)
@click.option(
    "--save-every",
    type=click.IntRange(1),
    default=_DEFAULTS.save_every,
    show_default=True,
    help="Steps between two saved states.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads  [default: every CPU].")
@click.option(
    "--weights",
    "float_type",
    type=click.Choice(get_args(FloatType)),
    default="bf16",
    show_default=True,
    help="How the head is stored.",
)
@click.option("--resume", is_flag=True, help="Go on where a training into this folder ended.")
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Build TARGET with the head, and say what it gains here on held-out prompts.",
)
@click.option(
    "--build",
    "built_bundle",
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="Keep the bundle that is measured, tuned for this machine, here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    target: str,
    method: str,
    paths: tuple[Path, ...],
    self_made: int | None,
    answer_tokens: int | None,
    data_budget: int | None,
    out: Path,
    steps: int | None,
    epochs: float | None,
    minutes: float | None,
    draft_vocab: int,
    draft_steps: int,
    lm_head: str | None,
    batch_tokens: int,
    precision: Precision,
    head: Path | None,
    learning_rate: float,
    patience: int,
    save_every: int,
    seed: int,
    threads: int | None,
    float_type: FloatType,
    resume: bool,
    measure: bool,
    built_bundle: Path | None,
    as_json: bool,
) -> None:
    """Train a drafting head of TARGET on its own answers and write it as such heads are published.

    TARGET is a Hugging Face directory, a hub id or a GGUF file: what the data set was made with.
    Killed while data are made, the same command goes on; while it trains, with --resume.
    """
    if sum(value is not None for value in (steps, epochs, minutes)) > 1:
        raise ConfigError("Give one of --steps, --epochs and --minutes: each says how long.")
    if lm_head and method != "medusa":
        raise ConfigError(f"--lm-head has no meaning for method {method}.")
    options = TrainOptions(
        method=method,
        num_draft_steps=draft_steps,
        draft_vocab_size=draft_vocab,
        tied_lm_head=lm_head != "own",
        steps=steps,
        epochs=_EPOCHS if steps is None and minutes is None and epochs is None else epochs,
        minutes=minutes,
        batch_tokens=batch_tokens,
        precision=precision,
        learning_rate=learning_rate,
        patience=patience,
        save_every=save_every,
        seed=seed,
    )
    source = DataSource(paths, self_made or 0, answer_tokens, data_budget, threads or 0)
    _check_measure(measure, built_bundle)
    check_out(out, resume=resume)
    if threads:
        _use_threads(threads)
    data = prepare_data(target, method, source, out, _tell)
    task = TrainTask(target, data, out, options, float_type, resume, head)
    with watching(console) as watch:
        report = train_head(task, watch, _tell)
    _plot(out, report)
    if measure:
        report = _measure(task, report, built_bundle, threads or 0)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
        return
    _summarise(task, report, built_bundle)


def _tell(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


def _check_measure(measure: bool, built_bundle: Path | None) -> None:
    """Refuse, before the long run, what contradicts itself or cannot be built after it."""
    if not measure and built_bundle is not None:
        raise ConfigError("--build keeps the bundle that is measured. Leave out --no-measure.")
    if built_bundle is not None:
        check_bundle(built_bundle)


def _measure(
    task: TrainTask, report: TrainReport, bundle: Path | None, num_threads: int
) -> TrainReport:
    """The report with what the head gains here, which is written, too."""
    if is_one_of_several():
        _tell(
            "Several processes train: nothing is measured. Build the head, and tune and bench it."
        )
        return report
    with console.status("Building"), built(task, bundle) as folder:
        trial = try_head(folder, task.data, report, num_threads)
    report = report.model_copy(update={"trial": trial})
    report.write(task.out)
    return report


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _plot(out: Path, report: TrainReport) -> None:
    try:
        from specexport.training.plot import draw
    except ModuleNotFoundError:
        console.print("No figure: install matplotlib for one (pip install 'specexport[bench]').")
        return
    write_whole(out / PLOT_NAME, draw(report))
    console.print(f"Figure: {out / PLOT_NAME}", soft_wrap=True, markup=False)


def _summarise(task: TrainTask, report: TrainReport, bundle: Path | None) -> None:
    rates = " ".join(f"{rate:.2f}" for rate in report.acceptance_rates)
    size = (task.out / "model.safetensors").stat().st_size
    click.echo(
        f"{task.out}: {report.options.method}, {report.num_parameters / 1e6:.1f}M parameters, "
        f"{size / 1e6:.1f} MB, step {report.best_step} of {report.num_steps} "
        f"({REPORT_NAME} has all figures)"
    )
    click.echo(
        f"Greedy drafts on {report.num_drafts} places of held-out answers: acceptance per position "
        f"{rates}; expected acceptance length {report.acceptance_length:.2f}"
    )
    if report.trial is not None:
        _show_trial(report.trial)
    if bundle is not None:
        click.echo(f"Run it: specexport generate {bundle} PROMPT")
        return
    click.echo(
        f"Build with it: specexport build {task.target} --method {report.options.method} "
        f"--head {task.out} -o BUNDLE"
    )


def _show_trial(trial: Trial) -> None:
    click.echo(
        f"Predicted: {trial.predicted_speed_up:.2f} times plain decoding with drafts of "
        f"{trial.num_draft_tokens}, by what steps cost here"
    )
    num_different = trial.num_different
    outputs = f"{num_different} outputs differ" if num_different else "the same outputs"
    click.echo(
        f"Measured on {trial.num_prompts} held-out prompts: {trial.fixed_speed_up:.2f} times with "
        f"fixed drafts, acceptance length {trial.acceptance_length:.2f}; "
        f"{trial.adaptive_speed_up:.2f} times with adaptive ones "
        f"({trial.plain_tokens_per_s:.1f}, {trial.fixed_tokens_per_s:.1f} and "
        f"{trial.adaptive_tokens_per_s:.1f} tokens/s); {outputs}"
    )
