"""What several commands share: options, the console, tables of statistics."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions, MethodName
from specexport.runtime.params import SamplingParams
from specexport.runtime.stats import RequestStats

F = TypeVar("F", bound=Callable[..., Any])

console = Console(stderr=True, highlight=False)
"""Everything but a command's result goes to standard error."""

BUNDLE = click.Path(path_type=Path)

DEFAULT_MAX_TOKENS = 256


def engine_options(function: F) -> F:
    """Options of every command that loads a bundle to run it."""
    for option in (
        click.option("--threads", type=int, default=0, help="CPU threads; 0 uses every CPU."),
        click.option(
            "--max-length", type=int, help="Prompt plus output tokens  [default: the bundle's]."
        ),
        click.option(
            "-k",
            "--num-speculative-tokens",
            type=int,
            help="Draft length; 0 decodes plainly  [default: the bundle's].",
        ),
        click.option(
            "--method",
            type=click.Choice(["none", "ngram", "suffix", "draft"]),
            help="How to draft  [default: the bundle's].",
        ),
    ):
        function = option(function)
    return function


def sampling_options(function: F) -> F:
    """Options that become `SamplingParams`."""
    for option in (
        click.option("--seed", type=int, help="Makes sampled output repeatable."),
        click.option(
            "--top-p", type=float, default=1.0, show_default=True, help="Nucleus; 1 keeps all."
        ),
        click.option("--top-k", type=int, default=0, help="Likeliest tokens kept; 0 keeps all."),
        click.option(
            "-t",
            "--temperature",
            type=float,
            default=0.0,
            show_default=True,
            help="0 is greedy.",
        ),
        click.option(
            "-n",
            "--max-tokens",
            type=int,
            help=f"Output tokens at the most  [default: {DEFAULT_MAX_TOKENS}, or what fits].",
        ),
    ):
        function = option(function)
    return function


def make_engine_options(
    method: MethodName | None,
    num_speculative_tokens: int | None,
    max_length: int | None,
    threads: int,
    max_slots: int = 1,
) -> EngineOptions:
    """`EngineOptions` from the options of `engine_options`."""
    return EngineOptions(
        max_slots=max_slots,
        max_length=max_length,
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        num_threads=threads,
    )


def make_params(
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    max_tokens: int | None,
    *,
    ignore_eos: bool = False,
) -> SamplingParams:
    """`SamplingParams` from the options of `sampling_options`."""
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=secrets.randbits(63) if seed is None else seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )


def default_max_tokens(engine: Engine, num_prompt: int) -> int:
    """What `--max-tokens` is when it is not given."""
    return max(min(DEFAULT_MAX_TOKENS, engine.max_length - num_prompt), 1)


def stats_dict(stats: RequestStats, num_prompt: int, num_output: int) -> dict[str, Any]:
    """A request's statistics for a program to read; seconds and tokens per second."""
    acceptance = stats.acceptance
    return {
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "prefill_time_s": stats.prefill_time_s,
        "decode_time_s": stats.decode_time_s,
        "tokens_per_s": stats.tokens_per_s(num_output),
        "decode_steps": stats.num_decode_steps,
        "drafts": acceptance.num_drafts,
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
    else:
        table.add_row("drafts", "none")
    return table
