"""`specexport data`."""

from pathlib import Path
from typing import get_args

import click

from specexport.commands.common import console
from specexport.commands.option_types import ListType, SizeType
from specexport.export.parts import ModelSource
from specexport.training.answers import AnswerLimits
from specexport.training.collect import ANSWERS_NAME, CollectOptions, collect_answers
from specexport.training.dataset import DataOptions, make_dataset, taps_for
from specexport.training.identity import find_checkpoint
from specexport.training.samples import DatasetSpec, StateType

_METHODS = ("eagle3", "medusa", "mtp", "draft")
_FILES = click.Path(exists=True, dir_okay=False, path_type=Path)
_EXAMPLES = """\b
Examples:
  specexport data model.gguf -o data --self-made 1000 --prompts chats.jsonl --answer-tokens 500000
  specexport data ./Llama-3.1-8B-Instruct -o data --given texts.txt --methods eagle3,medusa
"""


@click.command(epilog=_EXAMPLES)
@click.argument("target")
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder of the data set; one that is there is gone on with.",
)
@click.option(
    "--prompts",
    type=_FILES,
    multiple=True,
    help="Prompts that TARGET answers: JSON lines, or a text whose passages become tasks.",
)
@click.option(
    "--given",
    type=_FILES,
    multiple=True,
    help="Texts, or conversations with their answers, that are learnt as they are.",
)
@click.option(
    "--self-made",
    type=click.IntRange(0),
    default=0,
    help="So many prompts that TARGET writes itself.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Longest answer.",
)
@click.option(
    "--answer-tokens",
    type=click.IntRange(1),
    help="Enough tokens of all answers together  [default: answer all prompts].",
)
@click.option(
    "--methods",
    type=ListType(click.Choice(_METHODS)),
    default="eagle3,medusa,mtp",
    show_default=True,
    help="Which heads the data are for.",
)
@click.option(
    "--data-budget",
    type=SizeType(),
    help="Most bytes of states, such as 4GB; what does not fit is left out  [default: none].",
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Likeliest tokens that are kept with their probabilities.",
)
@click.option(
    "--state-type",
    type=click.Choice(get_args(StateType)),
    default="fp16",
    show_default=True,
    help="How states are stored.",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    default=1024,
    show_default=True,
    help="Longest sequence, prompt and answer together.",
)
@click.option(
    "--max-slots",
    type=click.IntRange(1, 64),
    default=32,
    show_default=True,
    help="Answers that are made at once.",
)
@click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads; 0: every CPU.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the prompts of its own making.")
@click.option("--json", "as_json", is_flag=True, help="Print what was made as JSON.")
def command(
    target: str,
    out: Path,
    prompts: tuple[Path, ...],
    given: tuple[Path, ...],
    self_made: int,
    max_tokens: int,
    answer_tokens: int | None,
    methods: tuple[str, ...],
    data_budget: int | None,
    top_k: int,
    state_type: StateType,
    max_length: int,
    max_slots: int,
    threads: int,
    seed: int,
    as_json: bool,
) -> None:
    """Make the data that drafting heads of TARGET are trained on: its answers, states and guesses.

    Stopped at any moment, the same command goes on. Without prompts, the answers that OUT holds
    are taken as they are.
    """
    num_layers = ModelSource.open(find_checkpoint(target), "target").config.num_layers
    data_options = DataOptions(
        taps=taps_for(methods, num_layers),
        top_k=top_k,
        state_type=state_type,
        max_length=max_length,
        budget_bytes=data_budget,
        num_threads=threads,
    )

    def tell(what: str) -> None:
        console.print(what, soft_wrap=True, markup=False)

    answers = out / ANSWERS_NAME
    if prompts or given or self_made or not answers.exists():
        collect_options = CollectOptions(
            prompts=prompts,
            given=given,
            num_self_made=self_made,
            limits=AnswerLimits(max_tokens, answer_tokens),
            max_length=max_length,
            max_slots=max_slots,
            num_threads=threads,
            seed=seed,
        )
        collect_answers(target, out, collect_options, tell)
    spec = make_dataset(target, answers, out, data_options, tell)
    if as_json:
        click.echo(spec.model_dump_json())
    else:
        tell(f"{out}: {_described(spec)}")


def _described(spec: DatasetSpec) -> str:
    num_sequences = sum(spec.recipe.sources.values())
    size_gb = sum(shard.file.size_bytes for shard in spec.shards) / 1e9
    return (
        f"{num_sequences} sequences, {spec.num_answer_tokens} answer tokens, {size_gb:.2f} GB in "
        f"{len(spec.shards)} shards"
    )
