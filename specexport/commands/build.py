"""`specexport build`."""

import sys
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from specexport.commands.common import console
from specexport.commands.engine_options import ENGINE_OPTIONS, engine_build_options
from specexport.commands.inspect_engine import engine_report
from specexport.commands.option_types import AcceptanceType, TreeType
from specexport.errors import ConfigError
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import (
    MANIFEST_NAME,
    WEIGHT_TYPES,
    Manifest,
    WeightType,
    read_manifest,
)
from specexport.export.methods import (
    DraftMethod,
    DynamicTreeSpec,
    HeadMethod,
    LosslessAcceptance,
    MedusaMethod,
    Method,
    NgramMethod,
    NoMethod,
    StaticTreeSpec,
    SuffixMethod,
    TopAcceptance,
    TypicalAcceptance,
)
from specexport.export.tensorrt.engines import add_engines
from specexport.export.tensorrt.wanted import WantedEngine

_METHODS: dict[str, type[BaseModel]] = {
    "ngram": NgramMethod,
    "suffix": SuffixMethod,
    "draft": DraftMethod,
    "medusa": MedusaMethod,
    "eagle": HeadMethod,
    "eagle3": HeadMethod,
    "mtp": HeadMethod,
    "none": NoMethod,
}
_LOOKUPS: dict[str, type[NgramMethod | SuffixMethod]] = {
    "ngram": NgramMethod,
    "suffix": SuffixMethod,
}
_EXAMPLES = """\b
Examples:
  specexport build HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2
  specexport build ./Qwen2.5-Coder-1.5B-Instruct --draft ./Qwen2.5-Coder-0.5B-Instruct -o coder
  specexport build model.gguf --method ngram -k 8 -o bundle
  specexport build model.gguf --precision int8 -o fast
  specexport build ./Llama-3.1-8B-Instruct --method eagle3 --head ./EAGLE3-LLaMA3.1-8B -o eagle
  specexport build ./MiMo-7B-RL --method mtp -o mimo
  specexport build model.gguf -o edge --engine tensorrt-rtx --gpu sm89,sm120 --precision fp16
  specexport build edge --engine tensorrt-rtx --gpu sm86
  specexport build model.gguf -o ada --engine tensorrt-rtx --gpu sm89 --precision fp8
"""


@click.command(epilog=_EXAMPLES)
@click.argument("model")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of the bundle; without it, MODEL is a bundle that gets engines.",
)
@click.option(
    "--method",
    type=click.Choice(list(_METHODS)),
    help="How to draft  [default: draft with --draft, else ngram].",
)
@click.option("--draft", metavar="MODEL", help="Smaller model with the same tokenizer.")
@click.option(
    "--head",
    metavar="PATH",
    help="Head of method medusa, eagle or eagle3: a directory, file or hub id; of mtp, where the "
    "layer is not in MODEL.",
)
@click.option(
    "--tree",
    type=TreeType(),
    help="Shape of a model's or head's drafts: dynamic[:DEPTH,TOP_K,NODES], or paths such as "
    "[[0],[1],[0,0]], as JSON or a file  [default: a chain].",
)
@click.option(
    "--lookup",
    type=click.Choice(["ngram", "suffix"]),
    help="Asked first; the method drafts where it finds nothing.",
)
@click.option(
    "--acceptance",
    type=AcceptanceType(),
    default="lossless",
    show_default=True,
    help="Or one of the LOSSY rules typical[:EPSILON,DELTA] and top[:N,DELTA].",
)
@click.option("-k", "--num-speculative-tokens", type=click.IntRange(1), help="Draft length.")
@click.option("--max-ngram", type=click.IntRange(1), help="Longest n-gram looked up.")
@click.option("--min-ngram", type=click.IntRange(1), help="Shortest n-gram looked up.")
@click.option("--min-match", type=click.IntRange(1), help="Shortest suffix match that counts.")
@click.option("--factor", type=click.IntRange(1), help="Draft tokens a token of a suffix match.")
@click.option(
    "--store-tokens",
    type=click.IntRange(0),
    help="Output tokens of earlier requests that suffixes are matched with  [default: 0].",
)
@click.option(
    "--weights",
    "weight_type",
    type=click.Choice(WEIGHT_TYPES),
    help="How matrices are stored  [default: as in the checkpoint]. int8 and int4 are lossy and "
    "several times as fast on a CPU; fp8 is for GPUs of sm89 and up.",
)
@click.option(
    "--lm-head-weights",
    "lm_head_type",
    type=click.Choice(WEIGHT_TYPES),
    help="The same for the output matrix  [default: that of --weights; int8 with int4].",
)
@click.option(
    "--embedding-weights",
    "embedding_type",
    type=click.Choice([each for each in WEIGHT_TYPES if each != "int4"]),
    help="The same for the embedding  [default: that of --weights; as in the checkpoint with int8, "
    "int4 or fp8].",
)
@click.option(
    "--draft-weights",
    "draft_weight_type",
    type=click.Choice(WEIGHT_TYPES),
    help="The same for the draft model or head  [default: that of --weights].",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    help="Prompt plus output tokens  [default: the model's context, at most 8192].",
)
@engine_build_options
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def command(
    model: str,
    output: Path | None,
    method: str | None,
    draft: str | None,
    head: str | None,
    tree: StaticTreeSpec | DynamicTreeSpec | None,
    lookup: Literal["ngram", "suffix"] | None,
    acceptance: LosslessAcceptance | TypicalAcceptance | TopAcceptance,
    num_speculative_tokens: int | None,
    max_ngram: int | None,
    min_ngram: int | None,
    min_match: int | None,
    factor: int | None,
    store_tokens: int | None,
    weight_type: WeightType | None,
    lm_head_type: WeightType | None,
    embedding_type: WeightType | None,
    draft_weight_type: WeightType | None,
    max_length: int | None,
    engines: tuple[WantedEngine, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Export MODEL and its drafter to a bundle.

    MODEL is a Hugging Face directory, a hub id or a GGUF file; or, without -o, a bundle, which gets
    the engines of --engine.
    """
    if output is None:
        bundle = Path(model)
        _show(bundle, _only_engines(bundle, engines, weight_type), as_json=as_json)
        return
    kind = method or ("draft" if draft else "ngram")
    given = {
        "tree": tree,
        "num_speculative_tokens": num_speculative_tokens,
        "max_ngram": max_ngram,
        "min_ngram": min_ngram,
        "min_match": min_match,
        "factor": factor,
        "store_tokens": store_tokens,
    }
    options = BuildOptions(
        method=_method(kind, {key: value for key, value in given.items() if value is not None}),
        draft=draft,
        head=head,
        lookup=_LOOKUPS[lookup]() if lookup else None,
        acceptance=acceptance,
        weight_type=weight_type,
        lm_head_type=lm_head_type,
        embedding_type=embedding_type,
        draft_weight_type=draft_weight_type,
        max_length=max_length,
        engines=engines,
        overwrite=overwrite,
        argv=tuple(sys.argv[1:]),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as bars:
        tasks = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        manifest = build(model, output, options, advance, console.print)
    _show(output, manifest, as_json=as_json)


def _only_engines(
    bundle: Path, engines: tuple[WantedEngine, ...], weight_type: WeightType | None
) -> Manifest:
    """Build engines of a bundle; options of an export are refused, for there is none.

    `weight_type` is what --precision says; it must be what the bundle is.
    """
    if not (bundle / MANIFEST_NAME).is_file():
        raise click.UsageError("Missing option '-o': the folder of the bundle to make.")
    if not engines:
        raise ConfigError(
            f"{bundle} is a bundle. Give --engine tensorrt-rtx to build plans of its graphs, or a "
            "model and -o to build another."
        )
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in ("model", "as_json", *ENGINE_OPTIONS):
            raise ConfigError(
                f"{parameter.opts[-1]} is for exporting a model, and {bundle} is a bundle. "
                "Leave it out."
            )
    target = read_manifest(bundle).target
    if weight_type not in (None, target.weight_type):
        raise ConfigError(
            f"--precision {weight_type} stores matrices, and those of {bundle} are stored already "
            f"({target.stored_as}). Leave it out, or build another bundle from the model (-o)."
        )
    return add_engines(bundle, engines, console.print)


def _show(output: Path, manifest: Manifest, *, as_json: bool) -> None:
    if as_json:
        click.echo(manifest.model_dump_json(indent=2))
        return
    _summarise(output, manifest)
    for engine in manifest.engines:
        Console(highlight=False).print(engine_report(output, manifest, engine))


def _method(kind: str, values: dict[str, Any]) -> Method:
    """The method with the given values; an option of another method is refused."""
    fields = _METHODS[kind].model_fields
    for key in values:
        if key not in fields or kind == "none":
            raise ConfigError(f"--{key.replace('_', '-')} has no meaning for method {kind}.")
    if kind == "medusa" and isinstance(values.get("tree"), DynamicTreeSpec):
        raise ConfigError("Method medusa drafts static trees alone. Give --tree a list of paths.")
    try:
        method: Method = _METHODS[kind].model_validate({**values, "kind": kind})  # type: ignore[assignment]
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"--{option} is {first['input']!r}; {reason}.") from None
    if isinstance(method, NgramMethod) and method.min_ngram > method.max_ngram:
        raise ConfigError(
            f"--min-ngram is {method.min_ngram}, above --max-ngram {method.max_ngram}."
        )
    return method


def _summarise(output: Path, manifest: Manifest) -> None:
    size = sum(entry.size_bytes for entry in manifest.files.values())
    target = manifest.target
    for note in manifest.provenance.notes:
        click.echo(f"Note: {note}")
    if manifest.head:
        click.echo(f"Head: {manifest.head.layout}")
    if manifest.acceptance.kind != "lossless":
        click.echo(
            f"LOSSY: acceptance {manifest.acceptance.kind} changes the output's distribution."
        )
    click.echo(
        f"{output}: {target.architecture}, {target.num_parameters / 1e6:.0f}M parameters, "
        f"{target.stored_as}, {target.max_length} tokens, method {manifest.method.kind}, "
        f"{size / 1e6:.0f} MB"
    )
