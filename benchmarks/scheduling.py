"""The time of a step that is the runtime's own: scheduling, draft sizes, building the batch.

A fake engine answers at once, so that what is measured is Python alone.
"""

import time
from collections.abc import Callable
from statistics import median

import click
import numpy as np

from benchmarks.common import header
from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.runtime.adaptive import AdaptiveLength, DraftShape
from specexport.runtime.batch import Batch, Row
from specexport.runtime.costs import StepCosts
from specexport.runtime.drafters.base import NoDrafter
from specexport.runtime.lengths import Outcome, RowState
from specexport.runtime.loop import SpeculativeLoop
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request
from tests.hash_engine import HashEngine, graph_spec

_LENGTH = 4096


class Instant(HashEngine):
    """Every token is equally good, and costs nothing."""

    def run(self, step: StepInput) -> StepOutput:
        """All logits are 0."""
        return StepOutput(np.zeros((len(step.logits_indices), 16), dtype=np.float32))


def microseconds(call: Callable[[], object], times: int) -> float:
    """Median of single calls."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return 1e6 * median(found)


def decoding_loop(num_rows: int) -> SpeculativeLoop:
    """Plain decoding of so many requests, past their prompts."""
    profile = Profile(max_slots=num_rows, max_length=_LENGTH, max_query=64)
    engine = Instant(spec=graph_spec(max_length=_LENGTH, vocab_size=16), profile=profile)
    loop = SpeculativeLoop(engine, NoDrafter(), 0, [])
    for i in range(num_rows):
        prompt = [1 + i % 10] * 8
        loop.submit(Request(i, SamplingParams(), _LENGTH - 8, len(prompt), prompt))
    for _ in range(2 * num_rows):
        loop.step()
    return loop


@click.command()
@click.option("--rows", "num_rows", default=16, show_default=True)
@click.option("--times", default=2000, show_default=True)
def main(num_rows: int, times: int) -> None:
    """Median microseconds of a step's parts for ROWS requests that decode."""
    print(header())
    loop = decoding_loop(num_rows)
    print(f"scheduling        {microseconds(loop._scheduler.next, times):7.1f} µs")
    table = StepCosts(num_tokens=(1, 64), seconds=(0.02, 0.1), row_context_s=0.0, pair_s=0.0)
    lengths = AdaptiveLength(table, table, [DraftShape.chain(n) for n in range(1, 7)])
    rows = [RowState(i, 100, 1, True, 6, 1) for i in range(num_rows)]
    for row in rows:
        lengths.observe(row.request_id, Outcome(6, 3))
    print(f"draft sizes       {microseconds(lambda: lengths.choose(rows), times):7.1f} µs")
    texts = [Row(100, [5], 1)] * num_rows
    print(f"building a batch  {microseconds(lambda: Batch.build(texts, _LENGTH), times):7.1f} µs")
    print(f"a whole step      {microseconds(loop.step, times):7.1f} µs")


if __name__ == "__main__":
    main()
