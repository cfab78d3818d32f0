"""Probabilities from logits, against transformers' logits processors."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.errors import EngineError
from specexport.runtime.distribution import Distribution, largest, to_distribution, top_ids
from specexport.runtime.params import SamplingParams
from tests.reference_options import reference_probs

VOCAB_SIZE = 700  # more than one round of top-p candidates


def dense(distribution: Distribution, vocab_size: int = VOCAB_SIZE) -> Any:
    probs = np.zeros(vocab_size)
    probs[distribution.token_ids] = distribution.probs
    return probs


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.05, 1.0, 5.0]),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 699, 700, 5000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.3, 1.0]),
    typical_p=st.sampled_from([1e-6, 0.2, 0.9, 0.999, 1.0]),
)
@settings(max_examples=300)
def test_distribution_equals_transformers_processors(
    seed: int, spread: float, **options: Any
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, VOCAB_SIZE).astype(np.float32)
    params = SamplingParams(**options)
    found = to_distribution(logits, params)
    assert np.all(np.diff(found.token_ids) > 0)
    expected = reference_probs(torch.from_numpy(logits), params)
    np.testing.assert_allclose(dense(found), expected, atol=1e-12)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 5, 64, 700, 3000]),
    count=st.integers(1, 400),
    num_values=st.sampled_from([2, 40, 10**6]),
)
@settings(max_examples=200)
def test_the_largest_values_are_found_with_all_their_ties(
    seed: int, size: int, count: int, num_values: int
) -> None:
    values = np.random.default_rng(seed).integers(0, num_values, size).astype(np.float32)
    limit = sorted(values, reverse=True)[min(count, size) - 1]
    assert largest(values, count).tolist() == [i for i in range(size) if values[i] >= limit]


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 5, 64, 3000]),
    count=st.integers(0, 70),
    share_nan=st.sampled_from([0.0, 0.05, 1.0]),
)
@settings(max_examples=200)
def test_the_likeliest_ids_are_those_of_a_stable_sort(
    seed: int, size: int, count: int, share_nan: float
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 9, size).astype(np.float32)  # few values: many are equal
    values[rng.random(size) < share_nan] = np.nan
    expected = sorted(range(size), key=lambda i: np.inf if np.isnan(values[i]) else -values[i])
    assert top_ids(values, count).tolist() == expected[:count]


def test_greedy_is_one_hot_at_the_first_largest_logit() -> None:
    logits = np.array([0.0, 3.0, 3.0, 1.0], dtype=np.float32)
    found = to_distribution(logits, SamplingParams())
    assert (found.token_ids.tolist(), found.probs.tolist()) == ([1], [1.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_is_an_error(bad: float, temperature: float) -> None:
    logits = np.zeros(8, dtype=np.float32)
    logits[5] = bad
    with pytest.raises(EngineError, match=r"logit that is (nan|inf)"):
        to_distribution(logits, SamplingParams(temperature=temperature))


def test_logits_of_minus_infinity_are_impossible_tokens() -> None:
    logits = np.array([0.0, -np.inf, 0.0], dtype=np.float32)
    found = to_distribution(logits, SamplingParams(temperature=1.0))
    assert found.prob(1) == 0.0


def test_sampling_inverts_the_cumulative_distribution() -> None:
    distribution = Distribution(np.array([3, 5, 9]), np.array([0.25, 0.5, 0.25]))
    draws = [distribution.sample(u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)]
    assert draws == [3, 3, 5, 5, 9, 9]


def test_prob_is_zero_outside_the_support() -> None:
    distribution = Distribution(np.array([3, 5]), np.array([0.25, 0.75]))
    assert [distribution.prob(t) for t in (0, 3, 4, 5, 6)] == [0, 0.25, 0, 0.75, 0]
