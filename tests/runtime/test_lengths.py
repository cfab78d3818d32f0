"""How long drafts are: fixed, or what promises the most tokens a second."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.adaptive import AdaptiveLength, DraftShape
from specexport.runtime.costs import LiveCosts, StepCosts
from specexport.runtime.growth import DynamicTree, StaticTree
from specexport.runtime.lengths import DraftSize, FixedLength, Outcome, RowState

CHAINS = [DraftShape.chain(length) for length in range(9)]


def costs(first_s: float, each_s: float) -> StepCosts:
    """A step costs `first_s`, and `each_s` more for every token after the first."""
    seconds = (first_s, first_s + 99 * each_s)
    return StepCosts(num_tokens=(1, 100), seconds=seconds, row_context_s=0.0, pair_s=0.0)


def row(request_id: int = 0, max_depth: int = 8, num_behind: int = 0) -> RowState:
    return RowState(request_id, 50, 1, True, max_depth, num_behind)


def depths(lengths: AdaptiveLength, *rows: RowState) -> list[int]:
    return [size.depth for size in lengths.choose(rows)]


def taught(
    rate: float, target: StepCosts, drafter: StepCosts | None = None, requests: int = 1
) -> AdaptiveLength:
    """After many drafts of which each token was accepted with probability `rate`."""
    lengths, rng = AdaptiveLength(target, drafter, CHAINS), np.random.default_rng(0)
    for _ in range(300):
        for request_id in range(requests):
            accepted = int(np.argmin([*(rng.random(8) < rate), False]))
            lengths.observe(request_id, Outcome(8, accepted))
    return lengths


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.8, 0.97])
@pytest.mark.parametrize("each_s", [0.0002, 0.002, 0.01])
def test_the_chosen_length_gives_nearly_the_most_tokens_a_second(
    rate: float, each_s: float
) -> None:
    """By the definition, expected tokens over time; the rate is estimated from recent drafts."""
    (found,) = depths(taught(rate, costs(0.02, each_s)), row())
    speeds = [sum(rate**i for i in range(n + 1)) / (0.02 + each_s * n) for n in range(9)]
    assert speeds[found] > 0.97 * max(speeds)


def test_a_costly_drafter_shortens_drafts_until_there_are_none() -> None:
    found = [
        depths(taught(0.6, costs(0.02, 0.0005), costs(draft_s, 0.0)), row())[0]
        for draft_s in (1e-6, 0.002, 0.006, 0.03)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] >= 5
    assert found[-1] == 0


def test_a_full_machine_ends_drafting() -> None:
    """Every token costs the same: a batch that large gains nothing from drafts."""
    lengths = taught(0.6, costs(0.02, 0.02), requests=16)
    assert depths(lengths, *[row(i) for i in range(16)]) == [0] * 16


def test_a_row_gets_no_longer_draft_than_it_may_have() -> None:
    lengths = taught(0.97, costs(0.02, 0.0001))
    assert depths(lengths, row(0), row(1, max_depth=3), row(2, max_depth=0)) == [8, 3, 0]
    assert depths(lengths, row(0, max_depth=0)) == [0]
    assert depths(lengths) == []


def test_a_prompt_that_is_computed_in_a_call_of_its_own_changes_nothing() -> None:
    lengths = taught(0.3, costs(0.02, 0.02))
    prompt = RowState(1, 200, 64, False, 0)
    assert depths(lengths, row(0), prompt) == [0, 0]
    lengths = taught(0.9, costs(0.02, 0.001))
    assert depths(lengths, row(0), prompt) == [*depths(lengths, row(0)), 0]


def test_the_end_of_a_prompt_may_have_a_draft_beside_texts_that_cannot() -> None:
    lengths = taught(0.9, costs(0.02, 0.001))
    prompt = RowState(1, 200, 64, True, 8)
    assert depths(lengths, row(0, max_depth=0), prompt) == [0, 8]
    assert depths(lengths, row(0, max_depth=3), prompt) == [3, 3]


def test_texts_that_cannot_draft_are_padded_too() -> None:
    """One row of many has a draft: the others pay for its length and gain nothing."""
    lengths = taught(0.8, costs(0.02, 0.002))
    others = [row(i, max_depth=0) for i in range(1, 8)]
    assert depths(lengths, row(0))[0] > 3
    assert depths(lengths, row(0), *others)[0] < 2


@pytest.mark.parametrize("each_s", [0.004, 0.012])
def test_trying_again_costs_a_small_share_and_drafting_comes_back_when_it_pays(
    each_s: float,
) -> None:
    lengths = taught(0.0, costs(0.02, each_s))
    spent = plain = 0.0
    for _ in range(3000):
        (length,) = depths(lengths, row())
        spent += 0.02 + each_s * length
        plain += 0.02
        lengths.observe(0, Outcome(length, 0))
    assert 1.005 < spent / plain < 1.02
    steps = 0
    while depths(lengths, row())[0] < 3 or steps < 100:  # the text has become predictable
        (length,) = depths(lengths, row())
        lengths.observe(0, Outcome(length, length))
        steps += 1
        assert steps < 20_000


def test_later_positions_are_tried_again_once_earlier_ones_are_accepted() -> None:
    lengths = AdaptiveLength(costs(0.02, 0.002), None, CHAINS)
    for _ in range(200):
        lengths.observe(0, Outcome(8, 1))
    assert depths(lengths, row())[0] < 4
    for _ in range(400):
        (length,) = depths(lengths, row())
        lengths.observe(0, Outcome(length, length))
    assert depths(lengths, row()) == [8]


def test_what_a_drafter_must_read_first_makes_trying_again_rarer() -> None:
    def num_tries(num_behind: int) -> int:
        lengths = taught(0.0, costs(0.02, 0.001), costs(0.002, 0.001))
        return sum(depths(lengths, row(num_behind=num_behind))[0] > 0 for _ in range(2000))

    assert num_tries(1) > 3 * num_tries(100) > 0


def test_what_one_of_many_must_read_first_counts_in_full() -> None:
    def num_tries(num_others: int) -> int:
        lengths = taught(0.0, costs(0.02, 0.0), costs(0.002, 0.001))
        rows = [row(num_behind=200), *[row(i, max_depth=0) for i in range(1, 1 + num_others)]]
        return sum(depths(lengths, *rows)[0] > 0 for _ in range(2500))

    assert num_tries(0) == num_tries(7) > 0


def test_rows_that_gain_little_get_shorter_drafts_where_the_drafter_takes_time() -> None:
    lengths = taught(0.9, costs(0.02, 0.0002), costs(0.001, 0.001), requests=4)
    for _ in range(100):
        lengths.observe(3, Outcome(8, 0))
    found = depths(lengths, *[row(i) for i in range(4)])
    assert found[:3] == [found[0]] * 3
    assert found[0] > 3
    assert found[3] == 1


def test_a_tree_is_chosen_where_it_pays_and_a_chain_where_the_batch_is_full() -> None:
    """Of each draft the tree has a third more tokens accepted than the chain in it."""
    tree = StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    growers = (tree, tree.narrowed(1))
    shapes = [g.shape(depth) for g in growers for depth in range(1, g.depth + 1)]

    def chosen(each_s: float, num_first: int) -> DraftSize:
        lengths = AdaptiveLength(costs(0.02, each_s), None, shapes)
        for _ in range(100):
            lengths.observe(0, Outcome(3, 3, is_tree=True, num_first=num_first))
        return lengths.choose([row(max_depth=3)])[0]

    assert chosen(0.0005, num_first=1) == DraftSize(3, 3)
    assert chosen(0.0005, num_first=3) == DraftSize(3, 1)
    assert chosen(0.008, num_first=2) == DraftSize(2, 1)


def test_a_request_is_judged_by_its_own_drafts() -> None:
    lengths = AdaptiveLength(costs(0.02, 0.002), None, CHAINS)
    for _ in range(200):
        lengths.observe(0, Outcome(8, 8))
        lengths.observe(1, Outcome(8, 0))
    assert depths(lengths, row(0)) == [8]
    assert depths(lengths, row(1))[0] < 3
    lengths.release(0)
    lengths.release(1)
    assert depths(lengths, row(0)) == depths(lengths, row(1))


def test_what_steps_really_take_corrects_the_table() -> None:
    lengths = taught(0.5, costs(0.02, 0.0))
    assert depths(lengths, row()) == [8]
    for _ in range(60):
        for width, seconds in ((1, 0.02), (2, 0.05), (3, 0.08), (5, 0.12), (9, 0.2)):
            lengths.observe_step(1, width, 50, seconds)
    assert depths(lengths, row()) == [0]


TABLES = st.builds(
    lambda seconds, row_s, pair_s: StepCosts(
        num_tokens=tuple(2**i for i in range(len(seconds))),
        seconds=tuple(sorted(seconds)),
        row_context_s=row_s,
        pair_s=pair_s,
    ),
    st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-9, 1e3]),
    st.sampled_from([0.0, 1e-9, 1e3]),
)
TREE = StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
ROWS = st.builds(
    lambda request_id, text, pending, is_whole, depth, behind: RowState(
        request_id, text + pending, pending, is_whole, depth if is_whole else 0, behind
    ),
    st.integers(0, 3),
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 8),
    st.sampled_from([0, 1, 10**6]),
)


@given(
    target=TABLES,
    drafter=st.none() | TABLES,
    steps=st.lists(
        st.tuples(
            st.lists(ROWS, max_size=5),
            st.floats(0, 1),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=20,
    ),
)
@settings(max_examples=100)
def test_whatever_the_numbers_a_row_gets_what_it_may_have(
    target: StepCosts,
    drafter: StepCosts | None,
    steps: list[tuple[list[RowState], float, float]],
) -> None:
    trees = [TREE.shape(depth) for depth in range(1, TREE.depth + 1)]
    lengths = AdaptiveLength(target, drafter, [*trees, *CHAINS])
    for rows, rate, seconds in steps:
        sizes = lengths.choose(rows)
        for state, size in zip(rows, sizes, strict=True):
            assert 0 <= size.depth <= state.max_depth
            accepted = round(rate * size.depth)
            lengths.observe(state.request_id, Outcome(size.depth, accepted))
        lengths.observe_step(max(len(rows), 1), 5, 100, seconds)
        assert all(np.isfinite(lengths.target.step_s(1, n, 100)) for n in (1, 5, 9))


def test_a_fixed_length_is_cut_to_what_a_row_may_have() -> None:
    sizes = FixedLength(4).choose([row(max_depth=8), row(max_depth=2)])
    assert [size.depth for size in sizes] == [4, 2]


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=6, unique=True), n=st.integers(1, 300)
)
@settings(max_examples=100)
def test_costs_lie_on_straight_lines_between_what_was_measured(sizes: list[int], n: int) -> None:
    known = sorted(sizes)
    seconds = tuple(float(np.sqrt(size)) for size in known)
    table = StepCosts(num_tokens=tuple(known), seconds=seconds, row_context_s=0.5, pair_s=0.25)
    if known[0] <= n <= known[-1]:
        assert table.step_s(1, n, 0) == pytest.approx(np.interp(n, known, seconds))
    more = 2 * 6 * 0.5 + n * 6 * 0.25
    assert table.step_s(2, n, 6) == pytest.approx(table.step_s(2, n, 0) + more)
    assert table.step_s(1, n, 0) >= 0


def test_an_outlier_hardly_moves_the_correction() -> None:
    live = LiveCosts(costs(0.01, 0.001))
    before = live.step_s(1, 4, 50)
    for _ in range(50):
        live.observe(1, 4, 50, before)
    live.observe(1, 4, 50, 10.0)
    assert live.step_s(1, 4, 50) <= 1.2 * before


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_not_learnt(seconds: float) -> None:
    live = LiveCosts(costs(0.01, 0.001))
    before = live.step_s(1, 4, 50)
    for _ in range(10):
        live.observe(1, 4, 50, seconds)
    assert live.step_s(1, 4, 50) == before


def test_a_busy_machine_makes_all_sizes_slower_and_an_odd_size_itself_alone() -> None:
    live, table = LiveCosts(costs(0.01, 0.001)), costs(0.01, 0.001)
    for i in range(400):
        size = (1, 4, 16)[i % 3]
        odd = 1.5 if size == 4 else 1.0
        live.observe(1, size, 50, 2 * odd * table.step_s(1, size, 50))
    assert live.step_s(1, 4, 50) == pytest.approx(3 * table.step_s(1, 4, 50), rel=0.05)
    assert live.step_s(1, 64, 50) == pytest.approx(2.3 * table.step_s(1, 64, 50), rel=0.15)


@pytest.mark.parametrize(
    "values",
    [
        {"num_tokens": (1, 2), "seconds": (0.1,)},
        {"num_tokens": (2, 1), "seconds": (0.1, 0.2)},
        {"num_tokens": (), "seconds": ()},
        {"num_tokens": (1,), "seconds": (float("nan"),)},
        {"num_tokens": (1,), "seconds": (0.0,)},
        {"num_tokens": (1, 2), "seconds": (0.2, 0.1)},
    ],
)
def test_a_damaged_table_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_tokens|seconds"):
        StepCosts(row_context_s=0.0, pair_s=0.0, **values)


def test_shapes_of_trees_count_what_is_verified_and_what_is_computed() -> None:
    tree = StaticTree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert [tree.shape(depth) for depth in range(4)] == [
        DraftShape(0, 0, (), 2),
        DraftShape(1, 2, (1,), 2),
        DraftShape(2, 5, (1, 2), 2),
        DraftShape(3, 6, (1, 2, 1), 2),
    ]
    assert StaticTree.chain(3).shape(2) == DraftShape.chain(2)
    dynamic = DynamicTree(depth=3, top_k=2, num_nodes=7)
    assert [dynamic.shape(depth) for depth in range(4)] == [
        DraftShape(0, 0, (), 2),
        DraftShape(1, 2, (1,), 2),
        DraftShape(2, 6, (1, 2), 2),
        DraftShape(3, 7, (1, 2, 2), 2),
    ]


def test_a_narrowed_tree_keeps_the_likeliest_children() -> None:
    tree = StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)])
    assert tree.narrowed(1).choices == StaticTree.chain(3).choices
    assert tree.narrowed(2).choices == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    assert tree.narrowed(9) is tree
    dynamic = DynamicTree(depth=4, top_k=3, num_nodes=20).narrowed(1)
    assert dynamic.shape(4) == DraftShape.chain(4)
