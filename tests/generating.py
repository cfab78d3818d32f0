"""Requests of every kind through a whole engine, to compare what two engines make of them."""

from pathlib import Path
from typing import Any

import numpy as np

from specexport.engines.available import EngineName
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.output import Completion
from specexport.runtime.params import SamplingParams

Outputs = list[tuple[tuple[int, ...], list[float]]]
"""Of each request: token ids, and the log-probabilities of the prompt and of them."""

_BEGINNING = "to be or not to be, to be or not, that is the question whether to be "
_PROMPTS = (_BEGINNING, _BEGINNING + "or not", "abcabcab", "x", _BEGINNING[5:60], _BEGINNING)


def outputs(bundle: Path, engine: EngineName, **options: Any) -> Outputs:
    """More requests than slots, greedy and sampled, some with log-probabilities of the prompt."""
    chosen = EngineOptions(engine=engine, num_threads=1, **options)
    with Engine(bundle, chosen) as loaded:
        streams = []
        for seed, prompt in enumerate(_PROMPTS):
            params = SamplingParams(
                temperature=seed % 3 * 0.5,
                seed=seed,
                max_tokens=8 + seed,
                ignore_eos=True,
                logprobs=True,
                prompt_logprobs=seed == 1,
            )
            streams.append(loaded.submit(prompt, params, priority=seed % 2))
        results = [stream.result() for stream in streams]
    return [(result.token_ids, _logprobs(result)) for result in results]


def _logprobs(result: Completion) -> list[float]:
    found = (*(result.prompt_logprobs or ()), *(result.logprobs or ()))
    return [token.logprob for token in found if token is not None]


def assert_same(found: Outputs, expected: Outputs, tolerance: float) -> None:
    """Token for token, and log-probabilities within `tolerance`."""
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)
