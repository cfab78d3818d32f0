"""`specexport bench`."""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from specexport.bench.load import ClosedLoop, PoissonArrivals
from specexport.bench.plan import Plan, Settings, make_plan
from specexport.bench.report import Environment, Report
from specexport.bench.results import LoadResult
from specexport.bench.run import bench as run_bench
from specexport.bench.table import tables
from specexport.commands.common import BUNDLE, ENGINE, console
from specexport.commands.option_types import ListType
from specexport.engines.available import EngineName
from specexport.errors import ConfigError
from specexport.export.manifest import read_manifest
from specexport.files import check_writable, write_whole
from specexport.runtime.async_engine import AsyncEngine
from specexport.runtime.options import MethodName

_CONCURRENCY = (1, 2, 4, 8)
_SLOTS = 8
_FORMATS = (".png", ".svg", ".pdf")
_STDOUT = Path("-")
_EXAMPLES = """\b
Examples:
  specexport bench smollm2
  specexport bench smollm2 --concurrency 1,4 --requests 8 --rounds 1
  specexport bench coder -k 2,4,8 --json coder.json --plot coder.png
  specexport bench coder --rate 0.5,1,2 --max-slots 16 --prompts mine.jsonl
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.option(
    "--concurrency",
    type=ListType(click.IntRange(1, 4096)),
    help="Clients at once; each sends a request when its last one has ended  [default: 1,2,4,8].",
)
@click.option(
    "--rate",
    "rates",
    type=ListType(click.FLOAT),
    help="Instead: requests a second that come at random times (Poisson).",
)
@click.option(
    "--max-slots",
    type=click.IntRange(1, 4096),
    help=f"With --rate: requests that run at once  [default: {_SLOTS}].",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Measured requests for each variant, load and round.",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Output tokens of a request at the most.",
)
@click.option(
    "-t",
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="0 is greedy; outputs of the variants are then compared.",
)
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Times that each variant is measured under each load.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32),
    default=0,
    show_default=True,
    help="Of the order of prompts, the arrival times and sampled outputs.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help='One prompt a line; in a .jsonl file objects with "prompt" or "messages"  '
    "[default: 32 prompts of several kinds].",
)
@click.option(
    "--method",
    type=click.Choice([name for name in get_args(MethodName) if name != "none"]),
    help="How to draft  [default: the bundle's].",
)
@click.option(
    "-k",
    "--num-speculative-tokens",
    "draft_lengths",
    type=ListType(click.IntRange(1)),
    default=(),
    help="Fixed draft lengths, such as 2,4  [default: the bundle's].",
)
@click.option(
    "--threads",
    "num_threads",
    type=click.IntRange(0),
    default=0,
    help="CPU threads; 0 uses every CPU.",
)
@ENGINE
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write all figures; - prints them."
)
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), help="Draw them (.png, .svg or .pdf)."
)
def command(
    bundle: Path,
    concurrency: tuple[int, ...] | None,
    rates: tuple[float, ...] | None,
    max_slots: int | None,
    num_requests: int,
    max_tokens: int,
    temperature: float,
    num_rounds: int,
    seed: int,
    prompts: Path | None,
    method: MethodName | None,
    draft_lengths: tuple[int, ...],
    num_threads: int,
    engine: EngineName,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure BUNDLE under load: speculation off, with fixed drafts, and adaptive, side by side.

    The variants take turns over several rounds, so that a noisy machine disturbs all alike. Each
    measurement loads its engine anew, one at a time: a bundle needs the memory of one engine.
    docs/benchmarking.md says what each figure means.
    """
    settings = Settings(
        num_requests=num_requests,
        max_tokens=max_tokens,
        temperature=temperature,
        num_rounds=num_rounds,
        seed=seed,
        num_threads=num_threads,
        engine=engine,
        method=method,
        draft_lengths=draft_lengths,
        prompts=prompts,
    )
    _check_files(json_file, plot_file)
    manifest = read_manifest(bundle)
    loads = _loads(concurrency, rates, max_slots, seed)
    plan = make_plan(bundle, manifest, loads, settings)
    environment = Environment.of(bundle, manifest, settings)
    results = _run(bundle, plan)
    report = Report(environment, settings, plan.mean_prompt_tokens, tuple(results))
    shown = console if json_file == _STDOUT else Console(highlight=False)
    shown.print(*tables(report), sep="\n")
    _write_files(report, json_file, plot_file)


def _loads(
    concurrency: tuple[int, ...] | None,
    rates: tuple[float, ...] | None,
    max_slots: int | None,
    seed: int,
) -> list[ClosedLoop] | list[PoissonArrivals]:
    if rates and concurrency:
        raise ConfigError(
            "--concurrency and --rate were given; requests arrive in one way or the other. Leave "
            "one of them out."
        )
    if rates:
        return [PoissonArrivals(rate, max_slots or _SLOTS, seed) for rate in rates]
    if max_slots:
        raise ConfigError(
            "--max-slots has a meaning with --rate alone: with --concurrency each client has a "
            "slot. Leave it out."
        )
    return [ClosedLoop(num_clients) for num_clients in concurrency or _CONCURRENCY]


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Refuse before the long run what could not be written after it."""
    for path in (json_file, plot_file):
        if path is not None and path != _STDOUT:
            check_writable(path)
    if plot_file is None:
        return
    if plot_file.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {plot_file} must end in {', '.join(_FORMATS)}. Rename it.")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed. Install it with: "
            "pip install 'specexport[bench]'"
        )


def _run(bundle: Path, plan: Plan) -> list[LoadResult]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task("", total=plan.num_requests)

        def progress(what: str, num_finished: int) -> None:
            bars.update(task, description=what, advance=num_finished)

        return asyncio.run(run_bench(plan, lambda options: AsyncEngine(bundle, options), progress))


def _write_files(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    text = json.dumps(report.as_dict(), ensure_ascii=False, indent=2) + "\n"
    if json_file == _STDOUT:
        click.echo(text, nl=False)
    elif json_file is not None:
        write_whole(json_file, text.encode())
    if plot_file is not None:
        from specexport.bench.plot import draw

        write_whole(plot_file, draw(report, plot_file.suffix.lower().removeprefix(".")))
