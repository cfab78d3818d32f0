"""Variants side by side."""

from dataclasses import replace

from specexport.bench.figures import Drafting, Figures
from specexport.bench.load import ClosedLoop
from specexport.bench.results import LoadResult, Measured, drafting_by_variant
from tests.bench.reports import make_results


def measured(tokens_per_s: float, *outputs: tuple[int, ...]) -> Measured:
    figures = Figures(tokens_per_s, 1.0, None, None, None)
    return Measured(figures, Drafting(), outputs, is_lossless=True)


def test_a_speedup_is_the_median_of_the_rounds_own_ratios() -> None:
    """The machine becomes slower and slower, but in each round for all variants."""
    rounds = [
        [measured(100), measured(200)],
        [measured(50), measured(110)],
        [measured(10), measured(19)],
    ]
    off, fixed = LoadResult.of(ClosedLoop(1), ["off", "fixed"], rounds).points
    assert (off.speedup, fixed.speedup) == (1, 2)
    assert fixed.figures.tokens_per_s == 110
    assert [figures.tokens_per_s for figures in fixed.rounds] == [200, 110, 19]


def test_outputs_are_compared_within_each_round() -> None:
    rounds = [
        [measured(1, (1,), (2,), (3,)), measured(1, (1,), (9,), (3,))],
        [measured(1, (1,), (7,), (3,)), measured(1, (1,), (2,), (8,))],
    ]
    off, fixed = LoadResult.of(ClosedLoop(1), ["off", "fixed"], rounds).points
    assert (off.num_compared, off.num_different) == (3, 0)
    assert (fixed.num_compared, fixed.num_different) == (3, 2)


def test_one_lossy_round_makes_a_variant_lossy() -> None:
    rounds = [[measured(1), replace(measured(1), is_lossless=False)]]
    points = LoadResult.of(ClosedLoop(1), ["off", "fixed"], rounds).points
    assert [point.is_lossless for point in points] == [True, False]


def test_drafts_of_a_variant_are_added_up_over_loads() -> None:
    drafting = drafting_by_variant(make_results())
    assert list(drafting) == ["off", "fixed", "adaptive"]
    assert drafting["off"].acceptance.num_drafts == 0
    # 2 loads x 3 rounds x 4 requests x 3 drafts
    assert drafting["fixed"].acceptance.num_drafts == 72
    assert drafting["fixed"].acceptance.rate_per_position == [1, 0, 0, 0]
    assert drafting["adaptive"].acceptance.rate_per_position == [1, 1, 0]
