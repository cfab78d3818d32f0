"""What several commands share: options, the console, tables of statistics."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from rich.console import Console
from rich.table import Table

from specexport.commands.option_types import AcceptanceType, TreeType
from specexport.engines.available import ENGINES
from specexport.runtime.options import EngineOptions, LookupName, MethodName
from specexport.runtime.stats import RequestStats

F = TypeVar("F", bound=Callable[..., Any])

console = Console(stderr=True, highlight=False)
"""Everything but a command's result goes to standard error."""

BUNDLE = click.Path(path_type=Path)
ENGINE = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="onnxruntime",
    show_default=True,
    help="What runs the graphs: onnxruntime on the CPU, the others on a GPU.",
)


def engine_options(function: F) -> F:
    """Options of every command that loads a bundle to run it."""
    for option in (
        click.option("--threads", type=int, default=0, help="CPU threads; 0 uses every CPU."),
        ENGINE,
        click.option(
            "--max-length", type=int, help="Prompt plus output tokens  [default: the bundle's]."
        ),
        click.option(
            "-k",
            "--num-speculative-tokens",
            type=int,
            help="Draft length; 0 decodes plainly  [default: up to the bundle's].",
        ),
        click.option(
            "--adaptive/--fixed",
            default=None,
            help="Choose each draft's size, up to -k, by what it costs and what is accepted, or "
            "draft as much as may be  [default: adaptive, unless -k or --tree is given].",
        ),
        click.option(
            "--acceptance",
            type=AcceptanceType(),
            help="lossless, or one of the LOSSY rules typical[:EPSILON,DELTA] and top[:N,DELTA]  "
            "[default: the bundle's].",
        ),
        click.option(
            "--tree",
            type=TreeType(),
            help="Shape of drafts: dynamic[:DEPTH,TOP_K,NODES], or paths as JSON  "
            "[default: the bundle's].",
        ),
        click.option(
            "--lookup",
            type=click.Choice(get_args(LookupName)),
            help="Asked first; the method drafts where it finds nothing  [default: the bundle's].",
        ),
        click.option(
            "--method",
            type=click.Choice(get_args(MethodName)),
            help="How to draft  [default: the bundle's].",
        ),
    ):
        function = option(function)
    return _as_engine_options(function)


def _as_engine_options(function: F) -> F:
    """Collect what `engine_options` parsed into the one parameter `options`."""

    @wraps(function)
    def command(**values: Any) -> Any:  # noqa: ANN401 - whatever the command returns
        names = (
            "engine",
            "method",
            "lookup",
            "tree",
            "acceptance",
            "adaptive",
            "num_speculative_tokens",
            "max_length",
        )
        chosen = {name: values.pop(name) for name in names}
        options = EngineOptions(max_slots=1, num_threads=values.pop("threads"), **chosen)
        return function(options=options, **values)

    return command  # type: ignore[return-value]


def stats_dict(
    stats: RequestStats, num_prompt: int, num_output: int, *, is_lossless: bool
) -> dict[str, Any]:
    """A request's statistics for a program to read; seconds and tokens per second."""
    acceptance = stats.acceptance
    return {
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "prefill_time_s": stats.prefill_time_s,
        "decode_time_s": stats.decode_time_s,
        "tokens_per_s": stats.tokens_per_s(num_output),
        "decode_steps": stats.num_decode_steps,
        "lossless": is_lossless,
        "drafts": acceptance.num_drafts,
        "draft_positions": sum(acceptance.proposed),
        "draft_nodes": acceptance.num_nodes,
        "acceptance_rate": acceptance.rate,
        "acceptance_rate_per_position": acceptance.rate_per_position,
        "acceptance_length": acceptance.length,
    }


def stats_table(values: dict[str, Any]) -> Table:
    """The same for a person."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("prompt", f"{values['prompt_tokens']} tokens in {values['prefill_time_s']:.2f} s")
    table.add_row(
        "output",
        f"{values['output_tokens']} tokens, {values['tokens_per_s']:.1f} tokens/s "
        f"in {values['decode_steps'] + 1} target steps",
    )
    if values["drafts"]:
        per_position = " ".join(f"{rate:.2f}" for rate in values["acceptance_rate_per_position"])
        table.add_row(
            "drafts",
            f"{values['drafts']}, acceptance length {values['acceptance_length']:.2f}, "
            f"rate {values['acceptance_rate']:.2f}, per position {per_position}",
        )
        if values["draft_nodes"] > values["draft_positions"]:
            nodes = values["draft_nodes"] / values["drafts"]
            table.add_row("trees", f"{nodes:.1f} nodes in each")
    else:
        table.add_row("drafts", "none")
    if not values["lossless"]:
        table.add_row("LOSSY", "accepted by a lossy rule: not the target's own distribution")
    return table
