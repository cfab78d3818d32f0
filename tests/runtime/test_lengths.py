"""How long drafts are: fixed, or what promises the most tokens a second."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.costs import Corrections, StepCosts
from specexport.runtime.growth import DynamicTree, StaticTree
from specexport.runtime.lengths import AdaptiveLength, DraftShape, FixedLength, RowState

CHAINS = [DraftShape.chain(length) for length in range(9)]


def costs(first_s: float, each_s: float, pair_s: float = 0.0) -> StepCosts:
    """A step costs `first_s`, and `each_s` more for every token after the first."""
    seconds = (first_s, first_s + 99 * each_s)
    return StepCosts(num_tokens=(1, 100), seconds=seconds, seconds_per_pair=pair_s)


def row(request_id: int = 0, max_draft: int = 8, num_tokens: int = 50) -> RowState:
    return RowState(request_id, num_tokens, 1, max_draft)


def taught(
    rate: float, target: StepCosts, drafter: StepCosts | None = None, requests: int = 1
) -> AdaptiveLength:
    """After many drafts of which each token was accepted with probability `rate`."""
    lengths, rng = AdaptiveLength(target, drafter, CHAINS), np.random.default_rng(0)
    for _ in range(300):
        for request_id in range(requests):
            accepted = int(np.argmin([*(rng.random(8) < rate), False]))
            lengths.observe(request_id, 8, accepted)
    return lengths


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.8, 0.97])
@pytest.mark.parametrize("each_s", [0.0002, 0.002, 0.01])
def test_the_chosen_length_gives_nearly_the_most_tokens_a_second(
    rate: float, each_s: float
) -> None:
    """By the definition, expected tokens over time; the rate is estimated from recent drafts."""
    (found,) = taught(rate, costs(0.02, each_s)).choose([row()])
    speeds = [sum(rate**i for i in range(n + 1)) / (0.02 + each_s * n) for n in range(9)]
    assert speeds[found] > 0.97 * max(speeds)


def test_a_costly_drafter_shortens_drafts_until_there_are_none() -> None:
    found = [
        taught(0.6, costs(0.02, 0.0005), costs(draft_s, 0.0)).choose([row()])[0]
        for draft_s in (0.0, 0.002, 0.006, 0.03)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] >= 5
    assert found[-1] == 0


def test_a_full_machine_ends_drafting() -> None:
    """Every token costs the same: a batch that large gains nothing from drafts."""
    lengths = taught(0.6, costs(0.02, 0.02), requests=16)
    assert lengths.choose([row(i) for i in range(16)]) == [0] * 16


def test_a_row_gets_no_longer_draft_than_it_may_have() -> None:
    lengths = taught(0.97, costs(0.02, 0.0001))
    assert lengths.choose([row(0), row(1, max_draft=3), row(2, max_draft=0)]) == [8, 3, 0]
    assert lengths.choose([row(0, max_draft=0)]) == [0]


def test_a_prompt_that_is_computed_makes_drafts_beside_it_free() -> None:
    """Its row is wide anyway: the others are padded to it."""
    lengths = taught(0.3, costs(0.02, 0.02))
    assert lengths.choose([row(0)]) == [0]
    prompt = RowState(1, 200, 64, 0)
    assert lengths.choose([row(0), prompt])[0] > 0


@pytest.mark.parametrize("each_s", [0.004, 0.04])
def test_trying_again_costs_a_small_share_and_drafting_comes_back_when_it_pays(
    each_s: float,
) -> None:
    lengths = taught(0.0, costs(0.02, each_s))
    spent = plain = 0.0
    for _ in range(2000):
        (length,) = lengths.choose([row()])
        spent += 0.02 + each_s * length
        plain += 0.02
        lengths.observe(0, length, 0)
    assert 1.005 < spent / plain < 1.02
    steps = 0
    while lengths.choose([row()])[0] < 3 or steps < 100:  # the text has become predictable
        (length,) = lengths.choose([row()])
        lengths.observe(0, length, length)
        steps += 1
        assert steps < 20_000


def test_a_request_is_judged_by_its_own_drafts() -> None:
    lengths = AdaptiveLength(costs(0.02, 0.002), None, CHAINS)
    for _ in range(200):
        lengths.observe(0, 8, 8)
        lengths.observe(1, 8, 0)
    assert lengths.choose([row(0)])[0] == 8
    assert lengths.choose([row(1)])[0] < 3
    lengths.release(0)
    lengths.release(1)
    assert lengths.choose([row(0)]) == lengths.choose([row(1)])


def test_what_steps_really_take_corrects_the_table() -> None:
    lengths = taught(0.5, costs(0.02, 0.0))
    assert lengths.choose([row()])[0] == 8
    for width, seconds in ((1, 0.02), (2, 0.05), (3, 0.08), (5, 0.12), (9, 0.2)):
        for _ in range(60):
            lengths.observe_step(1, width, 50, seconds)
    assert lengths.choose([row()])[0] == 0


def test_a_fixed_length_is_cut_to_what_a_row_may_have() -> None:
    assert FixedLength(4).choose([row(max_draft=8), row(max_draft=2)]) == [4, 2]


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=6, unique=True), n=st.integers(1, 300)
)
@settings(max_examples=100, deadline=None)
def test_costs_lie_on_straight_lines_between_what_was_measured(sizes: list[int], n: int) -> None:
    known = sorted(sizes)
    seconds = tuple(float(np.sqrt(size)) for size in known)
    table = StepCosts(num_tokens=tuple(known), seconds=seconds, seconds_per_pair=0.5)
    if known[0] <= n <= known[-1]:
        assert table.step_s(n, 0) == pytest.approx(np.interp(n, known, seconds))
    assert table.step_s(n, 6) == pytest.approx(table.step_s(n, 0) + 3)
    assert table.step_s(n, 0) >= 0


def test_an_outlier_hardly_moves_the_correction() -> None:
    corrections = Corrections()
    for _ in range(50):
        corrections.observe(4, 0.01, 0.01)
    corrections.observe(4, 0.01, 10.0)
    assert corrections.ratio(4) <= 1.1 + 1e-9
    assert corrections.ratio(64) == corrections.ratio(4)  # of a size that was never seen


@pytest.mark.parametrize(
    "values",
    [
        {"num_tokens": (1, 2), "seconds": (0.1,)},
        {"num_tokens": (2, 1), "seconds": (0.1, 0.2)},
        {"num_tokens": (), "seconds": ()},
        {"num_tokens": (1,), "seconds": (float("nan"),)},
    ],
)
def test_a_damaged_table_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_tokens|seconds"):
        StepCosts(seconds_per_pair=0.0, **values)


def test_shapes_of_trees_count_what_is_verified_and_what_is_computed() -> None:
    tree = StaticTree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert [tree.shape(depth) for depth in range(4)] == [
        DraftShape(0, ()),
        DraftShape(2, (1,)),
        DraftShape(5, (1, 2)),
        DraftShape(6, (1, 2, 1)),
    ]
    assert StaticTree.chain(3).shape(2) == DraftShape.chain(2)
    dynamic = DynamicTree(depth=3, top_k=2, num_nodes=7)
    assert [dynamic.shape(depth) for depth in range(4)] == [
        DraftShape(0, ()),
        DraftShape(2, (1,)),
        DraftShape(6, (1, 2)),
        DraftShape(7, (1, 2, 2)),
    ]
