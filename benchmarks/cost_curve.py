"""What one step costs by its query tokens, for several bundles of one model side by side.

The curve decides what a draft may cost: verifying K drafted tokens is a step of K + 1. The bundles
take turns, and the best of all rounds counts, so that a busy machine disturbs all alike.
"""

import time
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common import header
from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile, StepInput
from specexport.export.manifest import read_manifest
from specexport.runtime.batch import Batch, Row

_CALLS_A_TURN = 5  # the first waits for the idle threads of the other engines


def open_runner(bundle: Path, length: int, num_threads: int) -> OrtRunner:
    """The bundle's target with one slot of `length` tokens."""
    spec = read_manifest(bundle).target
    profile = Profile(max_length=length, max_query=length, num_threads=num_threads)
    return OrtRunner(bundle / spec.path, spec, profile)


def step_of(num_tokens: int, past: int, length: int) -> StepInput:
    """One row of `num_tokens` after `past` others, with logits for each, as in verification."""
    row = Row(past, [10 + i for i in range(num_tokens)], num_tokens)
    return Batch.build([row], length).step


def best_time_s(runner: OrtRunner, step: StepInput) -> float:
    """The fastest of a few calls."""
    times = []
    for _ in range(_CALLS_A_TURN):
        started = time.perf_counter()
        runner.run(step)
        times.append(time.perf_counter() - started)
    return min(times)


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--queries", default="1,2,4,5,8,16", help="Query tokens of a step.")
@click.option("--past", default=256, help="Tokens before them.")
@click.option("--rounds", default=20)
@click.option("--num-threads", default=0, help="0: one for each CPU.")
def main(bundles: tuple[Path, ...], queries: str, past: int, rounds: int, num_threads: int) -> None:
    """Milliseconds of a step of each of BUNDLES, in brackets the ratio to its first.

    The other columns say how many times as fast as the first bundle the others are.
    """
    sizes = [int(word) for word in queries.split(",")]
    length = past + max(sizes)
    best = dict.fromkeys([(b, q) for b in bundles for q in sizes], float("inf"))
    with ExitStack() as stack:
        runners = {b: stack.enter_context(open_runner(b, length, num_threads)) for b in bundles}
        for _ in range(rounds):
            for q in sizes:
                step = step_of(q, past, length)
                for bundle, runner in runners.items():
                    best[bundle, q] = min(best[bundle, q], best_time_s(runner, step))
    table = Table(title=f"{header()}\npast {past}", title_justify="left")
    stored = [f"{b.name} ({read_manifest(b).target.stored_as})" for b in bundles]
    for heading in (
        "query tokens",
        *stored,
        *(f"{bundles[0].name} / {b.name}" for b in bundles[1:]),
    ):
        table.add_column(heading, justify="right")
    for q in sizes:
        times = [best[b, q] for b in bundles]
        cells = [
            f"{1e3 * t:.2f} ({t / best[b, sizes[0]]:.2f})"
            for t, b in zip(times, bundles, strict=True)
        ]
        table.add_row(str(q), *cells, *(f"{times[0] / t:.2f}" for t in times[1:]))
    Console(width=140, highlight=False).print(table)


if __name__ == "__main__":
    main()
