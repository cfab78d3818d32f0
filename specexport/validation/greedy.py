"""Greedy tokens three ways: PyTorch, the bundle plainly, the bundle speculating."""

from collections.abc import Sequence

import numpy as np

from specexport.runtime.engine import Engine
from specexport.runtime.params import SamplingParams
from specexport.runtime.stats import AcceptanceStats
from specexport.validation.reference import Reference
from specexport.validation.report import GreedyDifference, GreedyReport


def generate_greedy(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Greedy outputs of all prompts, several in a batch."""
    streams = [engine.submit(p, SamplingParams(max_tokens=num_tokens)) for p in prompts]
    return [list(stream.result().token_ids) for stream in streams]


def compare_greedy(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    outputs: dict[str, list[list[int]]],
    acceptance: AcceptanceStats,
    tolerance: float,
) -> GreedyReport:
    """Find where outputs part; `outputs` has PyTorch's first, then each to compare with it.

    A difference is excused when PyTorch's top two logits there are closer than twice `tolerance`.
    """
    names = list(outputs)
    differences = []
    for name in names[1:]:
        for i, (expected, found) in enumerate(zip(outputs[names[0]], outputs[name], strict=True)):
            if (position := _first_difference(expected, found)) is not None:
                text = [*prompts[i], *expected[:position]]
                differences.append(
                    GreedyDifference(
                        prompt=i,
                        compared=f"{names[0]} / {name}",
                        position=position,
                        tokens=(_at(expected, position), _at(found, position)),
                        top2_gap=_top2_gap(reference, text),
                    )
                )
    return GreedyReport(
        num_prompts=len(prompts),
        num_tokens=sum(len(output) for output in outputs[names[0]]),
        identical=not differences,
        differences=tuple(differences),
        acceptance_length=acceptance.length,
        acceptance_per_position=tuple(acceptance.rate_per_position),
        passed=all(difference.top2_gap <= 2 * tolerance for difference in differences),
    )


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    for position in range(max(len(expected), len(found))):
        if _at(expected, position) != _at(found, position):
            return position
    return None


def _at(tokens: Sequence[int], position: int) -> int:
    return tokens[position] if position < len(tokens) else -1


def _top2_gap(reference: Reference, text: Sequence[int]) -> float:
    second, first = np.partition(reference.logits(text)[-1], -2)[-2:]
    return float(first - second)
