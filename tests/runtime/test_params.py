"""Request options: bad values and contradictions get one clear error each."""

from typing import Any

import numpy as np
import pytest

from specexport.errors import RequestError
from specexport.runtime.admission import Admission
from specexport.runtime.params import SamplingParams

ADMISSION = Admission(vocab_size=10, max_length=60, eos_token_ids=(0, 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number from 1 up, or None"),
        ({"max_tokens": 3.0}, "max_tokens is 3.0; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be a whole number from 0 up"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be a number from 0 up"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "1"}, "temperature is '1'; it must be a number"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number from 0"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be a number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be a number from 0 to 1"),
        ({"typical_p": 0}, "typical_p is 0; it must be a number above 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; .* from 0.01 to 100; 1 is none"),
        ({"frequency_penalty": 1e9}, "frequency_penalty is 1000000000.0; .* from -100 to 100"),
        ({"presence_penalty": "x"}, "presence_penalty is 'x'; it must be a number"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"n": 0}, "n is 0; it must be a whole number from 1 to 128"),
        ({"best_of": 1000}, "best_of is 1000; it must be a whole number from 1 to 128, or None"),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs is -2"),
        ({"logprobs": 5}, "logprobs is 5; it must be True or False"),
        ({"echo": "yes"}, "echo is 'yes'; it must be True or False"),
        ({"logprobs_of": "both"}, "logprobs_of is 'both'; it must be 'raw' or 'processed'"),
        ({"banned_token_ids": 3}, "banned_token_ids is 3; it must be a list of token ids"),
        ({"banned_token_ids": [-1]}, "banned_token_ids is .-1.; it must be a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'; it must be a list of token ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids is .1.5.; it must be a list"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty: no token could come"),
        ({"stop": ""}, "stop is ''; it must be a text or a list of texts, none of them empty"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop": [5]}, "stop is .5.; it must be a text or a list of texts"),
        ({"stop": None}, "stop is None; it must be a text or a list of texts"),
        ({"logit_bias": {3: 101}}, "logit_bias is .*; .* from -100 to 100 .* use banned_token_ids"),
        ({"logit_bias": {"3": 1}}, "logit_bias is .*; it must be token ids with numbers"),
        ({"logit_bias": [3]}, "logit_bias is .3.; it must be token ids with numbers"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias is .3: nan."),
    ],
)
def test_a_bad_value_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens is 9, but max_tokens is 8. Lower the one or raise the other",
        ),
        ({"n": 3, "best_of": 2, "temperature": 1}, "best_of is 2, but n is 3: .* Raise best_of"),
        ({"n": 2}, "n is 2, but temperature 0 gives the same output each time. Set a temperature"),
        ({"best_of": 4}, "best_of is 4, but temperature 0 gives the same output each time"),
        ({"typical_p": 0.5}, "typical_p is 0.5, but temperature 0 .* may rule out"),
        (
            {"allowed_token_ids": [3, 4], "banned_token_ids": [4]},
            "Token 4 stands in allowed_token_ids and in banned_token_ids. Take it out of one",
        ),
        (
            {"logit_bias": {4: 1}, "banned_token_ids": [4]},
            "logit_bias names token 4, which cannot come",
        ),
        (
            {"logit_bias": {4: 1}, "allowed_token_ids": [5]},
            "logit_bias names token 4, which cannot come",
        ),
        ({"top_logprobs": 3}, "top_logprobs is 3, but no log-probabilities are asked for"),
        (
            {"logprobs_of": "processed", "prompt_logprobs": True},
            "logprobs_of is 'processed', but the output's log-probabilities are not asked for",
        ),
    ],
)
def test_contradicting_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 51}, "max_tokens is 51, but the cache holds 60. Ask for at most 50"),
        ({"min_tokens": 51}, "min_tokens is 51, but the cache holds 60. Ask for at most 50"),
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids names token 10, .* vocabulary of 10"),
        ({"banned_token_ids": [11]}, "banned_token_ids names token 11"),
        ({"stop_token_ids": [12]}, "stop_token_ids names token 12"),
        ({"logit_bias": {13: 1.0}}, "logit_bias names token 13"),
        ({"logprobs": True, "top_logprobs": 11}, "top_logprobs is 11, but the vocabulary has 10"),
        ({"banned_token_ids": range(10)}, "banned_token_ids rules out the whole vocabulary"),
        (
            {"min_tokens": 1, "allowed_token_ids": [0, 1, 5], "stop_token_ids": [5]},
            "min_tokens is 1, but every token that may come ends the output",
        ),
    ],
)
def test_what_a_model_cannot_serve_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ADMISSION.max_tokens([3] * 10, SamplingParams(**values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 50, "min_tokens": 50},
        {"min_tokens": 1, "allowed_token_ids": [0, 1], "ignore_eos": True},
        {"min_tokens": 1, "allowed_token_ids": [0, 1, 2]},
        {"logprobs": True, "top_logprobs": 10},
        {"prompt_logprobs": True, "top_logprobs": 1},
        {"best_of": 3, "temperature": 1.0, "logprobs_of": "processed"},
        {"top_p": 0.5, "top_k": 3, "min_p": 0.1},  # at temperature 0 they keep the best token
    ],
)
def test_what_can_be_served_is_not_refused(values: dict[str, Any]) -> None:
    assert ADMISSION.max_tokens([3] * 10, SamplingParams(**values)) == 50


def test_values_are_copied_and_made_plain() -> None:
    bias, banned = {np.int64(3): np.float32(0.5)}, [np.int64(4)]
    params = SamplingParams(
        logit_bias=bias,  # type: ignore[arg-type]
        banned_token_ids=banned,  # type: ignore[arg-type]
        allowed_token_ids=(token_id for token_id in (2, 3)),  # type: ignore[arg-type]
        stop="end",
    )
    bias[np.int64(5)] = np.float32(1)
    banned.append(np.int64(6))
    assert params.logit_bias == {3: 0.5}
    assert params.banned_token_ids == (4,)
    assert params.allowed_token_ids == (2, 3)
    assert params.stop == ("end",)
    assert isinstance(hash(params), int)


def test_several_outputs_have_seeds_of_their_own_and_the_first_the_requests() -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=2, best_of=5)
    seeds = [choice.seed for choice in params.choices()]
    assert seeds[0] == 7
    assert len(set(seeds)) == 5
    others = SamplingParams(temperature=1.0, seed=8, n=5).choices()
    assert not set(seeds) & {choice.seed for choice in others}
    assert all(choice.num_outputs == 1 for choice in params.choices())
