"""What a step costs on this machine: measured by `specexport tune`, corrected while running."""

import platform
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specexport.engines.step import StepInput, StepRunner
from specexport.runtime.batch import Batch, Row

TUNING_NAME = "tuning.json"
_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_SHORT, _LONG = 16, 512
_REPEATS = 3

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StepCosts(_Frozen):
    """Seconds of one graph's step, by its query tokens and by what they look at.

    On a CPU a step of B rows costs what B·Q tokens of one row cost, plus attention.
    """

    num_tokens: tuple[Annotated[int, Field(gt=0)], ...]  # ascending
    seconds: tuple[Seconds, ...]
    seconds_per_pair: Seconds
    """For each (query token, context token)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.num_tokens) != len(self.seconds) or not self.num_tokens:
            raise ValueError("num_tokens and seconds must be lists of the same length")
        if list(self.num_tokens) != sorted(set(self.num_tokens)):
            raise ValueError("num_tokens must ascend")
        return self

    def step_s(self, num_tokens: int, num_pairs: int) -> float:
        """A step of so many query tokens, which look at so many pairs in all."""
        return self._tokens_s(num_tokens) + self.seconds_per_pair * num_pairs

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
    """Time steps of a loaded graph; its cache must be free. Takes some dozens of steps."""
    sizes = [n for n in _TOKENS if n <= runner.profile.max_query]
    seconds = []
    for size in sizes:
        seconds.append(_time_step(runner, _SHORT, size))
    # Interference only ever slows a step down, and a larger step is never faster.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    return StepCosts(
        num_tokens=tuple(sizes), seconds=tuple(seconds), seconds_per_pair=_pair_s(runner, sizes[-1])
    )


def _pair_s(runner: StepRunner, max_width: int) -> float:
    """Seconds for each (query, context) pair: how much slower a long context makes a step."""
    width = min(8, max_width)
    long = min(_LONG, runner.profile.max_length - width)
    if long <= _SHORT:
        return 0.0
    extra_s = _time_step(runner, long, width) - _time_step(runner, _SHORT, width)
    return max(extra_s, 0.0) / (width * (long - _SHORT))


def _time_step(runner: StepRunner, start: int, num_tokens: int) -> float:
    """Fastest of a few steps of one row, seconds."""
    step = _row_step(runner, start, num_tokens)
    runner.run(step)  # the first of a shape allocates
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        runner.run(step)
        times.append(time.perf_counter() - started)
    return min(times)


def _row_step(runner: StepRunner, start: int, num_tokens: int) -> StepInput:
    names = {tensor.name: tensor for tensor in runner.spec.inputs}
    states = None
    if (tensor := names.get("hidden_states")) is not None:
        states = np.zeros((num_tokens, int(tensor.shape[-1])), dtype=np.float32)
    row = Row(start, [1] * num_tokens, num_tokens, hidden_states=states)
    return Batch.build([row], runner.profile.max_length, runner.spec.sliding_window).step


class Corrections:
    """How much longer steps really take than the table says, by size; a running estimate."""

    def __init__(self, weight: float = 0.1) -> None:
        """`weight` is that of the newest step."""
        self._weight = weight
        self._ratios: dict[int, float] = {}

    def observe(self, num_tokens: int, predicted_s: float, measured_s: float) -> None:
        """Take in one step; a single outlier counts for little."""
        if predicted_s <= 0:
            return
        bucket = self._bucket(num_tokens)
        before = self._ratios.get(bucket, self.ratio(num_tokens))
        ratio = min(measured_s / predicted_s, 2 * before)
        self._ratios[bucket] = before + self._weight * (ratio - before)

    def ratio(self, num_tokens: int) -> float:
        """The factor for a step of this size; of unseen sizes the typical one."""
        return self._ratios.get(self._bucket(num_tokens), self.typical)

    @property
    def typical(self) -> float:
        """The factor of the sizes that were seen, in the middle; 1 before any."""
        return median(self._ratios.values()) if self._ratios else 1.0

    def _bucket(self, num_tokens: int) -> int:
        return int(np.log2(max(num_tokens, 1)) * 2)


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
