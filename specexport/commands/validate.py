"""`specexport validate`."""

from pathlib import Path

import click
from rich.console import Console

from specexport.commands.common import BUNDLE, console
from specexport.commands.engine_options import GPU, PRECISION
from specexport.engines.available import ENGINES, EngineName
from specexport.export.engine_spec import FloatType
from specexport.validation.report import report_table
from specexport.validation.run import ValidationOptions, validate

_EXAMPLES = """\b
Examples:
  specexport validate smollm2
  specexport validate smollm2 --num-prompts 4 --max-tokens 16
  specexport validate smollm2 --checkpoint ./SmolLM2-135M-Instruct --json
  specexport validate smollm2 --engine tensorrt-rtx --gpu sm89
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.option("--checkpoint", help="The target's checkpoint  [default: where it was built from].")
@click.option("--draft-checkpoint", help="The same for the draft model.")
@click.option("--head-checkpoint", help="The same for the head.")
@click.option("--num-prompts", type=click.IntRange(1), help="Prompts used  [default: all].")
@click.option("-n", "--max-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--num-samples", type=click.IntRange(100), default=600, show_default=True)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Largest logit difference  [default: 0.001].",
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="onnxruntime",
    show_default=True,
    help="Compare the outputs of this engine with ONNX Runtime's on the CPU, too. Where no GPU "
    "runs it, its plans are built ahead of time, and the report says that no more was proved.",
)
@GPU
@PRECISION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    bundle: Path,
    checkpoint: str | None,
    draft_checkpoint: str | None,
    head_checkpoint: str | None,
    num_prompts: int | None,
    max_tokens: int,
    num_samples: int,
    tolerance: float | None,
    engine: EngineName,
    gpus: tuple[str, ...],
    precision: FloatType | None,
    as_json: bool,
) -> None:
    """Prove BUNDLE against its checkpoint in PyTorch.

    Compares logits, the drafter's too, greedy tokens (PyTorch, plain, speculative) and the
    distribution of sampled outputs; writes validation.json into the bundle. The exit status is 0
    when all hold, else 1. A bundle with a LOSSY rule of acceptance is validated with the lossless
    one.
    """
    options = ValidationOptions(
        checkpoint=checkpoint,
        draft_checkpoint=draft_checkpoint,
        head_checkpoint=head_checkpoint,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        num_samples=num_samples,
        tolerance=tolerance,
        engine=engine,
        gpus=gpus,
        precision=precision,
    )
    if console.is_terminal:
        with console.status("Validating") as status:
            report = validate(bundle, options, status.update)
    else:
        report = validate(bundle, options)
    if as_json:
        click.echo(report.model_dump_json())
    else:
        Console(highlight=False).print(report_table(report))
    if not report.passed:
        raise SystemExit(1)
