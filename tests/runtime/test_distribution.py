"""Probabilities from logits, against transformers' logits processors."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specexport.errors import EngineError
from specexport.runtime.distribution import Distribution, to_distribution
from specexport.runtime.params import SamplingParams

VOCAB_SIZE = 700  # more than one round of top-p candidates


def dense(distribution: Distribution, vocab_size: int = VOCAB_SIZE) -> Any:
    probs = np.zeros(vocab_size)
    probs[distribution.token_ids] = distribution.probs
    return probs


def reference(logits: Any, params: SamplingParams) -> Any:
    scores = torch.from_numpy(logits).double()[None]
    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.05, 1.0, 5.0]),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 2, 50, 699, 700, 5000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_distribution_equals_transformers_processors(
    seed: int, spread: float, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, VOCAB_SIZE).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    found = to_distribution(logits, params)
    assert np.all(np.diff(found.token_ids) > 0)
    np.testing.assert_allclose(dense(found), reference(logits, params), atol=1e-12)


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
