"""`specexport tune`."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from specexport.commands.common import BUNDLE, ENGINE, console
from specexport.engines.available import EngineName
from specexport.runtime.tune import tune
from specexport.runtime.tuning import TUNING_NAME, Tuning

_EXAMPLES = """\b
Examples:
  specexport tune smollm2
  specexport tune coder --threads 4
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.option(
    "--threads", type=click.IntRange(0, 1024), default=0, help="CPU threads; 0 uses every CPU."
)
@ENGINE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, threads: int, engine: EngineName, as_json: bool) -> None:
    """Measure what steps of BUNDLE's graphs cost here, for --adaptive to choose draft lengths by.

    Writes tuning.json into the bundle. Run it on a quiet machine.
    """
    with console.status("Measuring"):
        tuning = tune(bundle, threads, engine)
    if as_json:
        click.echo(tuning.model_dump_json())
    else:
        Console(highlight=False).print(_table(tuning))
        console.print(f"Written to {bundle / TUNING_NAME}", soft_wrap=True, markup=False)


def _table(tuning: Tuning) -> Table:
    """Milliseconds of a step by its query tokens, and how many times one token's."""
    table = Table(title=f"milliseconds a step: {tuning.machine}", title_justify="left")
    table.add_column("tokens", justify="right")
    for path in tuning.costs:
        table.add_column(path, justify="right")
    sizes = sorted({n for costs in tuning.costs.values() for n in costs.num_tokens})
    for n in sizes:
        cells = []
        for costs in tuning.costs.values():
            seconds = costs.step_s(1, n, 0)
            cells.append(f"{seconds * 1e3:.2f} ({seconds / costs.step_s(1, 1, 0):.2f}x)")
        table.add_row(str(n), *cells)
    return table
