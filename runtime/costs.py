"""What a step costs on this machine: measured by `specexport tune`, corrected while running."""

import math
import platform
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specexport.engines.step import StepInput, StepRunner
from specexport.runtime.batch import Batch, Row

TUNING_NAME = "tuning.json"
_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_SHORT, _LONG = 16, 512
_ROUNDS = 4
_BUDGET_S = 3.0
"""Of the first round over all sizes."""
_LOAD_WEIGHT, _SIZE_WEIGHT = 0.1, 0.05
"""Of the newest step."""

Kind = TypeVar("Kind")

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StepCosts(_Frozen):
    """Seconds of one graph's step, by its rows, its query tokens and their context.

    Apart from attention, a step of B rows costs what B·Q tokens of one row cost; attention reads
    each row's context once, and computes with every query token's.
    """

    num_tokens: tuple[Annotated[int, Field(gt=0)], ...]  # ascending
    seconds: tuple[Seconds, ...]
    row_context_s: Seconds
    """For each token that a row looks at."""
    pair_s: Seconds
    """For each token that a query token looks at."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.num_tokens) != len(self.seconds) or not self.num_tokens:
            raise ValueError("num_tokens and seconds must be lists of the same length")
        if list(self.num_tokens) != sorted(set(self.num_tokens)):
            raise ValueError("num_tokens must ascend")
        return self

    def step_s(self, num_rows: int, num_tokens: int, longest: int) -> float:
        """A step of so many rows and query tokens in all, where the longest text is so long."""
        context_s = (self.row_context_s * num_rows + self.pair_s * num_tokens) * longest
        return self._tokens_s(num_tokens) + context_s

    def _tokens_s(self, num_tokens: int) -> float:
        """Between measured points and past the last one on straight lines."""
        known = self.num_tokens
        if len(known) == 1:
            return self.seconds[0] * num_tokens / known[0]
        i = min(max(bisect_left(known, num_tokens), 1), len(known) - 1)
        (n0, n1), (s0, s1) = known[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return max(s0 + (s1 - s0) * (num_tokens - n0) / (n1 - n0), 0.0)


class Tuning(_Frozen):
    """The whole of `tuning.json`."""

    machine: str
    """Where it was measured: of another machine it says nothing."""
    costs: dict[str, StepCosts]
    """By the path of the graph in the bundle."""


def describe_machine(num_threads: int) -> str:
    """What the costs depend on: processor, threads and engine."""
    import onnxruntime

    processor = _processor_name() or platform.machine()
    return f"{processor}, {num_threads} threads, onnxruntime {onnxruntime.__version__}"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def measure_costs(runner: StepRunner) -> StepCosts:
    """Time steps of a loaded graph; its cache must be free. Takes some dozens of steps.

    Of a large model, whose steps are slow, the largest sizes are left out.
    """
    started = time.perf_counter()
    sizes, steps = [], {}
    for size in _TOKENS:
        if size > runner.profile.max_query or time.perf_counter() - started > _BUDGET_S:
            break
        sizes.append(size)
        steps[size] = _row_step(runner, _SHORT, size)
        runner.run(steps[size])  # the first of a shape allocates
    times = _fastest(runner, steps)
    # Interference only ever slows a step down, and a larger step is never faster.
    seconds = np.minimum.accumulate([times[size] for size in reversed(sizes)])[::-1].tolist()
    row_s, pair_s = _context_s(runner, sizes[-1])
    return StepCosts(
        num_tokens=tuple(sizes), seconds=tuple(seconds), row_context_s=row_s, pair_s=pair_s
    )


def _context_s(runner: StepRunner, max_width: int) -> tuple[float, float]:
    """How much slower a token more of context makes a step: for each row, for each query token."""
    width = min(8, max_width)
    more = min(_LONG, runner.profile.max_length - width) - _SHORT
    if more <= 0 or width < 2:
        return 0.0, 0.0
    steps = {
        (start, size): _row_step(runner, start, size)
        for start in (_SHORT, _SHORT + more)
        for size in (1, width)
    }
    times = _fastest(runner, steps)
    one, all_s = (
        max(times[_SHORT + more, size] - times[_SHORT, size], 0.0) / more for size in (1, width)
    )
    pair_s = max(all_s - one, 0.0) / (width - 1)
    return max(one - pair_s, 0.0), pair_s


def _fastest(runner: StepRunner, steps: dict[Kind, StepInput]) -> dict[Kind, float]:
    """Seconds of each step, the fastest of a few rounds over all of them."""
    times = dict.fromkeys(steps, math.inf)
    for _ in range(_ROUNDS):
        for kind, step in steps.items():
            started = time.perf_counter()
            runner.run(step)
            times[kind] = min(times[kind], time.perf_counter() - started)
    return times


def _row_step(runner: StepRunner, start: int, num_tokens: int) -> StepInput:
    names = {tensor.name: tensor for tensor in runner.spec.inputs}
    states = None
    if (tensor := names.get("hidden_states")) is not None:
        states = np.zeros((num_tokens, int(tensor.shape[-1])), dtype=np.float32)
    row = Row(start, [1] * num_tokens, num_tokens, hidden_states=states)
    return Batch.build([row], runner.profile.max_length, runner.spec.sliding_window).step


class LiveCosts:
    """A table, corrected by what steps really take: for the machine's load, and size by size."""

    def __init__(self, table: StepCosts) -> None:
        self._table = table
        self.load = 1.0
        """How much longer steps of all sizes take now."""
        self._sizes: dict[int, float] = {}

    def step_s(self, num_rows: int, num_tokens: int, longest: int) -> float:
        """As the table's, corrected."""
        factor = self._sizes.get(_size(num_tokens), 1.0) * self.load
        return self._table.step_s(num_rows, num_tokens, longest) * factor

    def observe(self, num_rows: int, num_tokens: int, longest: int, seconds: float) -> None:
        """Take in one step; a single outlier counts for little."""
        predicted = self._table.step_s(num_rows, num_tokens, longest)
        if predicted <= 0:
            return
        size = _size(num_tokens)
        factor = self._sizes.get(size, 1.0)
        ratio = min(seconds / predicted, 2 * factor * self.load)
        self.load += _LOAD_WEIGHT * (ratio / factor - self.load)
        self._sizes[size] = factor + _SIZE_WEIGHT * (ratio / self.load - factor)


def _size(num_tokens: int) -> int:
    """Sizes that are corrected together: two for each doubling."""
    return int(2 * math.log2(max(num_tokens, 1)))


def read_costs(bundle: Path, machine: str) -> dict[str, StepCosts]:
    """What `tuning.json` says for this machine; nothing where it is missing, foreign or damaged."""
    try:
        tuning = Tuning.model_validate_json((bundle / TUNING_NAME).read_text())
    except (OSError, ValidationError, UnicodeDecodeError):
        return {}
    return tuning.costs if tuning.machine == machine else {}


def write_tuning(bundle: Path, tuning: Tuning) -> None:
    """Write `tuning.json` whole or not at all; raises `OSError` where the bundle is read-only."""
    path = bundle / TUNING_NAME
    temporary = path.with_suffix(".tmp")
    temporary.write_text(tuning.model_dump_json(indent=2) + "\n")
    temporary.replace(path)


def costs_of(bundle: Path, runners: Sequence[StepRunner], num_threads: int) -> dict[str, StepCosts]:
    """The costs of each graph on this machine, by its path.

    What the bundle does not know yet is measured now, while the caches are free, and kept there
    if it can be written to.
    """
    machine = describe_machine(num_threads)
    known = read_costs(bundle, machine)
    missing = [runner for runner in runners if runner.spec.path not in known]
    if missing:
        known |= {runner.spec.path: measure_costs(runner) for runner in missing}
        with suppress(OSError):
            write_tuning(bundle, Tuning(machine=machine, costs=known))
    return known
