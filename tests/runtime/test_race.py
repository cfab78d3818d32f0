"""Draws by an exponential race: the right distribution, and alike where distributions are."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from specexport.runtime.distribution import Distribution
from specexport.runtime.params import SamplingParams
from specexport.runtime.picking import drawn, raced
from specexport.runtime.race import _exponentials, draw
from specexport.runtime.token_map import TokenMap

FALSE_ALARM_RATE = 1e-5  # of each test, over the choice of the seeds, which are fixed


def random_distribution(rng: Any, size: int, vocab_size: int) -> Distribution:
    """Over a random support, some tokens far likelier than others."""
    ids = np.sort(rng.choice(vocab_size, size, replace=False))
    weights = np.exp(rng.gumbel(0, 2, size))
    return Distribution(ids, weights / weights.sum())


@pytest.mark.parametrize(("size", "vocab_size"), [(2, 5), (12, 12), (40, 400), (300, 300)])
def test_each_token_is_drawn_with_its_probability(size: int, vocab_size: int) -> None:
    distribution = random_distribution(np.random.default_rng(size), size, vocab_size)
    num_draws = 20_000
    draws = [draw(distribution, 7, position) for position in range(num_draws)]
    found = np.array([draws.count(token_id) for token_id in distribution.token_ids])
    expected = distribution.probs * num_draws
    common = expected >= 10
    rare = [found[~common].sum(), expected[~common].sum()]
    cells = [(f, e) for f, e in zip(found[common], expected[common], strict=True)]
    cells += [tuple(rare)] if rare[1] >= 5 else []
    observed, wanted = np.array(cells).T
    wanted *= observed.sum() / wanted.sum()
    assert chisquare(observed, wanted).pvalue > FALSE_ALARM_RATE


def test_times_are_exponential_and_independent_of_one_another() -> None:
    names = np.arange(20_000)
    first, second = _exponentials(names, 1), _exponentials(names, 2)
    assert kstest(first, "expon").pvalue > FALSE_ALARM_RATE
    below = np.exp(-first)  # uniform
    for other in (np.exp(-second), np.roll(below, 1), np.roll(below, 64)):
        counts, _, _ = np.histogram2d(below, other, bins=8)
        assert chisquare(counts.ravel()).pvalue > FALSE_ALARM_RATE


def test_a_token_without_probability_is_never_drawn() -> None:
    distribution = Distribution(np.array([0, 3, 70]), np.array([0.0, 1.0, 0.0]))
    assert {draw(distribution, seed, 0) for seed in range(50)} == {3}


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 10_000), size=st.integers(1, 60))
@settings(max_examples=100)
def test_a_draw_is_a_function_of_seed_and_position(seed: int, position: int, size: int) -> None:
    distribution = random_distribution(np.random.default_rng(size), size, 100)
    token_id = draw(distribution, seed, position)
    assert token_id in distribution.token_ids
    assert token_id == draw(distribution, seed, position)


def test_near_distributions_mostly_draw_the_same_token_far_more_often_than_by_chance() -> None:
    """Acceptance of rejection sampling is 1 - the total variation distance: the most there is.

    Measured over these 3,000 draws: 0.80 of at most 0.83; the draft's likeliest token: 0.58.
    """
    rng = np.random.default_rng(0)
    same = most = likeliest = 0.0
    for i in range(300):
        logits = rng.gumbel(0, 2, 2000)
        near = logits + rng.normal(0, 0.7, 2000)
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (logits, near))
        target, draft = Distribution(np.arange(2000), p), Distribution(np.arange(2000), q)
        same += sum(draw(target, i, n) == draw(draft, i, n) for n in range(10)) / 3000
        most += float(np.minimum(p, q).sum()) / 300
        likeliest += float(p[q.argmax()]) / 300
    assert same > most - 0.06
    assert same > likeliest + 0.15


def test_raced_picks_are_different_tokens_of_which_the_first_is_the_own_draw() -> None:
    logits = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    params, token_map = SamplingParams(temperature=0.8, seed=5, top_k=6), TokenMap(40)
    distribution = token_map.distribution(logits, params)
    assert distribution is not None
    picks = list(raced(params, token_map).pick(logits, range(9), 11, 0))
    assert picks[0][0] == draw(distribution, 5, 11)
    assert {token_id for token_id, _ in picks} == set(distribution.token_ids.tolist())
    assert all(probs.is_one_hot for _, probs in picks)


@pytest.mark.parametrize("make_picker", [drawn, raced])
def test_greedy_requests_get_the_likeliest_tokens_of_their_ranks(make_picker: Any) -> None:
    logits = np.array([0.1, 5.0, 3.0, 4.0], dtype=np.float32)
    picker = make_picker(SamplingParams(), TokenMap(4))
    assert [token_id for token_id, _ in picker.pick(logits, [0, 2], 0, 0)] == [1, 2]
    assert list(picker.pick(np.full(4, np.nan, dtype=np.float32), [0], 0, 0)) == []
