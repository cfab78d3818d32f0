"""Timing the steps of loaded graphs."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from specexport.engines.step import FunctionRunner, StepInput, StepRunner
from specexport.runtime.batch import Batch, Row
from specexport.runtime.costs import StepCosts

_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_SHORT, _LONG = 16, 512
_ROUNDS = 6
_BUDGET_S = 1.0
"""Of the first round over all sizes."""
_LEAST_SIZES = 4
"""Measured however long they take: one alone would say that a draft costs all it can gain."""

Kind = TypeVar("Kind")
Input = TypeVar("Input")


def measure_costs(runner: StepRunner) -> StepCosts:
    """Time steps of a loaded graph; its cache must be free. Takes some dozens of steps.

    Of a large model, whose steps are slow, the largest sizes are left out.
    """
    started = time.perf_counter()
    max_length = runner.profile.max_length
    largest = min(runner.profile.max_query, max_length)
    sizes: list[int] = []
    steps = {}
    for size in _TOKENS:
        is_late = len(sizes) >= _LEAST_SIZES and time.perf_counter() - started > _BUDGET_S
        if size > largest or is_late:
            break
        sizes.append(size)
        steps[size] = _row_step(runner, min(_SHORT, max_length - size), size)
        runner.run(steps[size])  # the first of a shape allocates
    times = _fastest(runner.run, steps)
    # Interference only ever slows a step down, and a larger step is never faster.
    seconds = np.minimum.accumulate([times[size] for size in reversed(sizes)])[::-1].tolist()
    row_s, pair_s = _context_s(runner, sizes[-1])
    return StepCosts(
        num_tokens=tuple(sizes), seconds=tuple(seconds), row_context_s=row_s, pair_s=pair_s
    )


def is_typical(runner: StepRunner) -> bool:
    """False where it was loaded so small that what is measured would not do for others."""
    profile, most = runner.profile, runner.spec.max_length
    is_long = profile.max_length >= min(_SHORT + _LONG, most)
    return is_long and profile.max_query >= min(_TOKENS[-1], most)


def measure_function(function: FunctionRunner, width: int) -> StepCosts:
    """Time a graph without a cache by its rows [B, width]; a row counts as a query token."""
    rows = {size: np.zeros((size, width), dtype=np.float32) for size in (1, 4, 16)}
    for states in rows.values():
        function.run(states)
    times = _fastest(function.run, rows)
    seconds = np.minimum.accumulate([times[size] for size in reversed(rows)])[::-1].tolist()
    return StepCosts(num_tokens=tuple(rows), seconds=tuple(seconds), row_context_s=0.0, pair_s=0.0)


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
    times = _fastest(runner.run, steps)
    one, all_s = (
        max(times[_SHORT + more, size] - times[_SHORT, size], 0.0) / more for size in (1, width)
    )
    pair_s = max(all_s - one, 0.0) / (width - 1)
    return max(one - pair_s, 0.0), pair_s


def _fastest(run: Callable[[Input], object], steps: dict[Kind, Input]) -> dict[Kind, float]:
    """Seconds of each step, the fastest of a few rounds over all of them."""
    times = dict.fromkeys(steps, math.inf)
    for _ in range(_ROUNDS):
        for kind, step in steps.items():
            started = time.perf_counter()
            run(step)
            times[kind] = min(times[kind], time.perf_counter() - started)
    return times


def _row_step(runner: StepRunner, start: int, num_tokens: int) -> StepInput:
    names = {tensor.name: tensor for tensor in runner.spec.inputs}
    states = None
    if (tensor := names.get("hidden_states")) is not None:
        states = np.zeros((num_tokens, int(tensor.shape[-1])), dtype=np.float32)
    row = Row(start, [1] * num_tokens, num_tokens, hidden_states=states)
    return Batch.build([row], runner.profile.max_length, runner.spec.sliding_window).step
