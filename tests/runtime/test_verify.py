"""Rejection sampling: the exact identity, and the three regimes."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.random import Purpose, uniform
from specexport.runtime.tree import ROOT
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
@settings(max_examples=1000)
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
    return Draft.chain(tokens, (draft,) * length)


def draw_siblings(proposal: Distribution, seed: int, width: int) -> tuple[list[int], list[Any]]:
    """Up to `width` tokens drawn without replacement, and what each was drawn from."""
    tokens: list[int] = []
    probs: list[Distribution] = []
    left: Distribution | None = proposal
    while left is not None and len(tokens) < width:
        tokens.append(left.sample(uniform(seed, 0, Purpose.DRAFT, len(tokens))))
        probs.append(left)
        left = left.without(tokens[-1])
    return tokens, probs


def output_of_siblings(target: Distribution, left: Distribution | None, width: int) -> Any:
    """Exact output distribution, [V], over all draws of `width` siblings and all decisions."""
    if left is None or width == 0:
        return np.array([target.prob(t) for t in range(VOCAB_SIZE)])
    output = np.zeros(VOCAB_SIZE)
    for token_id in left.token_ids.tolist():
        accept = accept_probability(target, left, token_id)
        rejected = output_of_siblings(target.residual(left), left.without(token_id), width - 1)
        output += left.prob(token_id) * (1 - accept) * rejected
        output[token_id] += left.prob(token_id) * accept
    return output


@given(target=distributions(), proposal=distributions(), width=st.integers(1, 3))
@settings(max_examples=150)
def test_siblings_drawn_without_replacement_give_exactly_the_target(
    target: Distribution, proposal: Distribution, width: int
) -> None:
    expected = np.array([target.prob(t) for t in range(VOCAB_SIZE)])
    output = output_of_siblings(target, proposal, width)
    np.testing.assert_allclose(output, expected, atol=1e-12)


@given(target=distributions(), order=st.permutations(range(VOCAB_SIZE)), width=st.integers(1, 4))
@settings(max_examples=200)
def test_certain_siblings_give_exactly_the_target(
    target: Distribution, order: list[int], width: int
) -> None:
    """One after the other, as if each had been drawn from a one-hot distribution."""
    output, reached, rest = np.zeros(VOCAB_SIZE), 1.0, target
    for token_id in order[:width]:
        proposal = Distribution.one_hot(token_id)
        accept = accept_probability(rest, proposal, token_id)
        output[token_id] += reached * accept
        reached *= 1 - accept
        rest = rest.residual(proposal)
    output += reached * np.array([rest.prob(t) for t in range(VOCAB_SIZE)])
    expected = np.array([target.prob(t) for t in range(VOCAB_SIZE)])
    np.testing.assert_allclose(output, expected, atol=1e-12)


def make_tree(kind: str, proposal: Distribution, seed: int) -> Draft:
    """Two levels: two or three siblings below the text, two below the first of them."""
    first, first_probs = draw_siblings(proposal, seed, 3)
    second, second_probs = draw_siblings(proposal, seed + 10**9, 2)
    if kind == "certain":
        first, first_probs = [2, 0], [Distribution.one_hot(2), Distribution.one_hot(0)]
        second, second_probs = [1, 3], [Distribution.one_hot(1), Distribution.one_hot(3)]
    if kind == "mixed":  # a certain sibling first, then drawn ones
        left = proposal.without(2)
        assert left is not None
        first, first_probs = draw_siblings(left, seed, 2)
        first, first_probs = [2, *first], [Distribution.one_hot(2), *first_probs]
    parents = (*([ROOT] * len(first)), *([0] * len(second)))
    return Draft((*first, *second), parents, (*first_probs, *second_probs))


@pytest.mark.parametrize("kind", ["sampled", "certain", "mixed"])
def test_pairs_of_tokens_of_a_tree_follow_the_target(kind: str) -> None:
    """χ² over the first two tokens, the second conditioned on the first."""
    rng = np.random.default_rng(2)
    start = Distribution(np.arange(4), rng.dirichlet(np.ones(4)))
    after = [Distribution(np.arange(4), rng.dirichlet(np.ones(4))) for _ in range(4)]
    proposal = Distribution(np.arange(4), rng.dirichlet(np.ones(4)))
    num_samples, counts, depths = 20_000, Counter[tuple[int, ...]](), Counter[int]()
    for seed in range(num_samples):
        draft = make_tree(kind, proposal, seed)

        def target_at(node: int, draft: Draft = draft) -> Distribution:
            return start if node == ROOT else after[draft.token_ids[node]]

        verdict = verify(draft, target_at, seed, 0)
        depths[verdict.num_accepted] += 1
        tokens = verdict.token_ids
        if len(tokens) == 1:
            follows = after[tokens[0]]
            tokens += verify(Draft(), lambda node, d=follows: d, seed, 1).token_ids  # type: ignore[misc]
        counts[tokens[:2]] += 1
    probabilities = [start.probs[a] * after[a].probs[b] for a in range(4) for b in range(4)]
    observed = [counts[(a, b)] for a in range(4) for b in range(4)]
    expected = np.array(probabilities) * num_samples
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM_RATE
    assert min(depths[d] for d in range(3)) > num_samples / 100  # every depth is reached


def test_a_tree_accepts_the_path_that_the_target_takes() -> None:
    draft = Draft(
        (5, 7, 1, 2, 0),
        (ROOT, ROOT, 0, 1, 3),
        tuple(Distribution.one_hot(t) for t in (5, 7, 1, 2, 0)),
    )
    best = {ROOT: 7, 0: 9, 1: 2, 2: 9, 3: 0, 4: 8}
    verdict = verify(draft, lambda node: Distribution.one_hot(best[node]), 0, 0)
    assert verdict == Verdict((7, 2, 0, 8), (1, 3, 4))


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
        tokens = verify(draft, lambda node, t=targets: t[node + 1], seed, 0).token_ids  # type: ignore[misc]
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
    verdict = verify(
        Draft.certain([4, 1, 2]), lambda node: Distribution.one_hot(best[node + 1]), 0, 0
    )
    assert verdict == Verdict((4, 1, 3), (0, 1))


def test_a_single_drafted_token_is_verified_too() -> None:
    verdict = verify(Draft.certain([1]), lambda i: Distribution.one_hot(2), 0, 3)
    assert verdict == Verdict((2,), ())


def test_a_certain_draft_does_not_change_seeded_output() -> None:
    rng = np.random.default_rng(3)
    targets = [Distribution(np.arange(6), rng.dirichlet(np.ones(6))) for _ in range(5)]
    for seed in range(200):
        plain = [verify(Draft(), lambda i, p=p: targets[p], seed, p).token_ids[0] for p in range(5)]  # type: ignore[misc]
        guess = rng.integers(0, 6, 4).tolist()
        tokens = verify(Draft.certain(guess), lambda node: targets[node + 1], seed, 0).token_ids
        assert list(tokens) == plain[: len(tokens)]


def test_the_target_is_asked_no_further_than_needed() -> None:
    asked = []

    def target_at(i: int) -> Distribution:
        asked.append(i)
        return Distribution.one_hot(0)

    verify(Draft.certain([0, 5, 5]), target_at, 0, 0)
    assert asked == [ROOT, 0]


def test_uniform_numbers_are_uniform_and_their_streams_independent() -> None:
    draws = np.array([[uniform(7, i, p) for i in range(4000)] for p in Purpose])
    for stream in draws:
        assert stats.kstest(stream, "uniform").pvalue > FALSE_ALARM_RATE
    assert np.abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 0.08  # 5 standard deviations
    assert uniform(7, 0, Purpose.DRAFT) == uniform(7, 0, Purpose.DRAFT)
    assert len({uniform(seed, 0, Purpose.DRAFT) for seed in (0, 1, 2**63, 2**64 - 1)}) == 4
