"""Rejection sampling: the exact identity, and the three regimes."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specexport.runtime.distribution import Distribution
from specexport.runtime.drafters.base import Draft
from specexport.runtime.random import Purpose, uniform
from specexport.runtime.verify import Verdict, accept_probability, verify

VOCAB_SIZE = 9
FALSE_ALARM_RATE = 1e-5


@st.composite
def distributions(draw: Any) -> Distribution:
    """Any support, from one token to all, with probabilities from tiny to large."""
    size = draw(st.integers(1, VOCAB_SIZE))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.sort(rng.choice(VOCAB_SIZE, size, replace=False))
    weights = rng.random(size) ** draw(st.sampled_from([0.1, 1, 20])) + 1e-12
    return Distribution(ids, weights / weights.sum())


@given(target=distributions(), draft=distributions())
@settings(max_examples=1000, deadline=None)
def test_accepting_and_recovering_gives_exactly_the_target(
    target: Distribution, draft: Distribution
) -> None:
    accept = np.zeros(VOCAB_SIZE)
    for token_id in draft.token_ids:
        accept[token_id] = accept_probability(target, draft, int(token_id))
    q = np.array([draft.prob(t) for t in range(VOCAB_SIZE)])
    p = np.array([target.prob(t) for t in range(VOCAB_SIZE)])
    rest = target.residual(draft)
    recovered = np.array([rest.prob(t) for t in range(VOCAB_SIZE)])
    output = q * accept + (1 - (q * accept).sum()) * recovered
    np.testing.assert_allclose(output, p, atol=1e-12)


@given(target=distributions())
def test_equal_distributions_leave_a_residual_without_nan(target: Distribution) -> None:
    rest = target.residual(target)
    assert np.isfinite(rest.probs).all()
    assert rest.probs.sum() == pytest.approx(1)


def draw_draft(draft: Distribution, seed: int, position: int, length: int) -> Draft:
    tokens = [draft.sample(uniform(seed, position + i, Purpose.DRAFT)) for i in range(length)]
    return Draft(tuple(tokens), (draft,) * length)


@pytest.mark.parametrize("kind", ["sampled", "certain", "argmax of a model"])
def test_pairs_of_output_tokens_follow_the_target(kind: str) -> None:
    """χ² over the first two tokens; with the fixed seeds below a right verifier never fails."""
    rng = np.random.default_rng(1)
    first, second = (Distribution(np.arange(4), rng.dirichlet(np.ones(4))) for _ in range(2))
    proposal = Distribution(np.arange(4), rng.dirichlet(np.ones(4)))
    num_samples, counts = 20_000, Counter[tuple[int, ...]]()
    for seed in range(num_samples):
        draft = draw_draft(proposal, seed, 0, 2)
        if kind == "certain":
            draft = Draft.certain([2, 1])
        elif kind == "argmax of a model":
            draft = Draft.certain([int(proposal.probs.argmax())] * 2)
        targets = (first, second, second)
        tokens = verify(draft, targets.__getitem__, seed, 0).token_ids
        if len(tokens) == 1:  # the next step goes on without a draft
            tokens += verify(Draft(), lambda i: second, seed, 1).token_ids
        counts[tokens[:2]] += 1
    expected = np.outer(first.probs, second.probs).ravel() * num_samples
    observed = [counts[(a, b)] for a in range(4) for b in range(4)]
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM_RATE


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    target = Distribution(np.arange(5), np.random.default_rng(0).dirichlet(np.ones(5)))
    for seed in range(2000):
        assert verify(draw_draft(target, seed, 7, 4), lambda i: target, seed, 7).num_accepted == 4


def test_an_impossible_draft_is_always_rejected() -> None:
    target = Distribution(np.array([0, 1]), np.array([0.5, 0.5]))
    draft = Distribution(np.array([2, 3]), np.array([0.5, 0.5]))
    for seed in range(500):
        assert verify(draw_draft(draft, seed, 0, 3), lambda i: target, seed, 0).num_accepted == 0


def test_greedy_keeps_the_matching_prefix_and_adds_the_targets_own_token() -> None:
    best = [4, 1, 3, 0]
    verdict = verify(Draft.certain([4, 1, 2]), lambda i: Distribution.one_hot(best[i]), 0, 0)
    assert verdict == Verdict((4, 1, 3), 2)


def test_a_single_drafted_token_is_verified_too() -> None:
    verdict = verify(Draft.certain([1]), lambda i: Distribution.one_hot(2), 0, 3)
    assert verdict == Verdict((2,), 0)


def test_a_certain_draft_does_not_change_seeded_output() -> None:
    rng = np.random.default_rng(3)
    targets = [Distribution(np.arange(6), rng.dirichlet(np.ones(6))) for _ in range(5)]
    for seed in range(200):
        plain = [verify(Draft(), lambda i, p=p: targets[p], seed, p).token_ids[0] for p in range(5)]  # type: ignore[misc]
        guess = rng.integers(0, 6, 4).tolist()
        tokens = verify(Draft.certain(guess), targets.__getitem__, seed, 0).token_ids
        assert list(tokens) == plain[: len(tokens)]


def test_the_target_is_asked_no_further_than_needed() -> None:
    asked = []

    def target_at(i: int) -> Distribution:
        asked.append(i)
        return Distribution.one_hot(0)

    verify(Draft.certain([0, 5, 5]), target_at, 0, 0)
    assert asked == [0, 1]


def test_uniform_numbers_are_uniform_and_their_streams_independent() -> None:
    draws = np.array([[uniform(7, i, p) for i in range(4000)] for p in Purpose])
    for stream in draws:
        assert stats.kstest(stream, "uniform").pvalue > FALSE_ALARM_RATE
    assert np.abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 0.08  # 5 standard deviations
    assert uniform(7, 0, Purpose.DRAFT) == uniform(7, 0, Purpose.DRAFT)
    assert len({uniform(seed, 0, Purpose.DRAFT) for seed in (0, 1, 2**63, 2**64 - 1)}) == 4
