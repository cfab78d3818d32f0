"""Loops whose tokens the decide graph chooses: outputs are those of the host."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from specexport.engines.ort_decide import OrtDecider
from specexport.engines.step import DecideInput, DecideOutput
from specexport.errors import EngineError
from specexport.export.methods import TypicalAcceptance
from specexport.runtime.deciding import decidable
from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.packing import pack
from specexport.runtime.params import SamplingParams
from specexport.runtime.processing import LogitsProcessor
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.turn import Turn
from tests.decide_tools import Case, certain_tree, decider
from tests.hash_engine import VOCAB_SIZE, HashEngine, graph_spec
from tests.loop_tools import DRAFTERS, EOS, make_loop, make_request, run


class Counting(OrtDecider):
    """Counts the steps it decides, and leaves requests to the host where it is told to."""

    def __init__(self, leaves: bool = False) -> None:
        self._inner, self._leaves, self.num_calls = decider(VOCAB_SIZE), leaves, 0

    def run(self, logits: Any, decide: DecideInput) -> DecideOutput:
        self.num_calls += 1
        found = self._inner.run(logits, decide)
        if not self._leaves:
            return found
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        is_decided = found.is_decided & (np.arange(len(found.is_decided)) % 2 == 1)
        return DecideOutput(**values | {"is_decided": is_decided})


def requests() -> list[Request]:
    """Of many kinds; those of one kind only come together now and then."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 6, "top_k": 5, "top_p": 0.8, "logprobs": True},
        {"repetition_penalty": 1.4, "logit_bias": {3: 2.0}},
        {"temperature": 1.5, "seed": 7, "min_p": 0.1, "frequency_penalty": 0.3, "min_tokens": 9},
        {"temperature": 1.0, "seed": 8, "banned_token_ids": [4, 5]},
    ]
    prompts = [[1, 2, 3], [4, 5] * 20, [7], [8, 1, 8, 1, 8], [2, 2], [9, 3]]
    return [make_request(p, 14, **o) for p, o in zip(prompts, options, strict=True)]


def outputs(name: str, k: int, decides: OrtDecider | None) -> list[list[int]]:
    found = requests()
    loop = make_loop(DRAFTERS[name](), k, [EOS], decider=decides)
    reported = run(loop, found)
    assert all(request.error is None for request in found)
    return [reported[request.id] for request in found]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_outputs_are_those_of_the_host(name: str, leaves: bool) -> None:
    graph = Counting(leaves)
    assert outputs(name, 4, graph) == outputs(name, 4, None)
    assert graph.num_calls > 0


def test_logits_that_cannot_be_read_end_the_requests_of_that_call_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(engine: HashEngine) -> None:
        raise EngineError("The GPU is gone.")

    loop = make_loop(DRAFTERS["always right"](), 3, decider=Counting(leaves=True))
    failing, other = make_request([1, 2], 4), make_request([1, 2], 4)
    with monkeypatch.context() as patch:
        patch.setattr(HashEngine, "read_logits", fail)
        run(loop, [failing])
    run(loop, [other])
    assert (failing.finish_reason, failing.error) == (FinishReason.ERROR, "The GPU is gone.")
    assert other.error is None


def test_log_probabilities_are_those_of_the_host() -> None:
    found: list[list[float]] = []
    for graph in (None, Counting()):
        request = make_request([1, 2], 12, temperature=1.0, seed=3, logprobs=True)
        loop, logprobs = make_loop(DRAFTERS["sometimes right"](), 4, decider=graph), []
        loop.submit(request)
        while loop.has_work:
            logprobs += [p.logprob for new in loop.step() for p in new.logprobs]
        found.append(logprobs)
    assert len(found[0]) == 12
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)  # single precision


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [1, 2]},
        {"temperature": 1.0, "typical_p": 0.5},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "logprobs_of": "processed"},
        {"prompt_logprobs": True},
    ],
)
def test_what_the_graph_cannot_decide_is_decided_on_the_host(options: dict[str, Any]) -> None:
    found = []
    for graph in (None, Counting()):
        request = make_request([1, 2, 3], 6, seed=4, **options)
        reported = run(make_loop(DRAFTERS["always right"](), 3, decider=graph), [request])
        assert request.error is None
        found.append(reported[request.id])
        assert graph is None or graph.num_calls == 0 or "prompt_logprobs" in options
    assert found[0] == found[1]


def test_a_lossy_rule_is_the_hosts() -> None:
    graph = Counting()
    loop = make_loop(DRAFTERS["always right"](), 3, (), TypicalAcceptance(), graph)
    run(loop, [make_request([1, 2, 3], 6, temperature=1.0)])
    assert graph.num_calls == 0


_NONE = Draft()


def turn(draft: Draft = _NONE, **options: Any) -> Turn:
    logits = np.zeros((1 + len(draft), VOCAB_SIZE))
    return Case.of(SamplingParams(**options), draft, logits).turn


def test_trees_that_were_drawn_at_random_are_the_hosts() -> None:
    spec, wide = graph_spec(), Distribution(np.array([1, 2]), np.array([0.5, 0.5]))
    chain = Draft.chain([1, 2], [wide, wide])
    tree = Draft((1, 2), (-1, -1), (wide, Distribution.one_hot(2)))
    certain = certain_tree([1, 2, 3], [-1, -1, 0])
    assert len(decidable([turn(chain), turn(certain)], spec)) == 2
    assert decidable([turn(), turn(tree)], spec) == []


def test_top_k_is_the_graphs_as_far_as_it_looks_or_where_it_keeps_all() -> None:
    spec = graph_spec(vocab_size=2000)
    taken = [bool(decidable([turn(top_k=k)], spec)) for k in (0, 1024, 1025, 1999, 2000, 10**30)]
    assert taken == [True, True, False, False, True, True]
    pack([turn(top_k=10**30)], spec)


def test_more_adjusted_logits_than_a_plan_takes_are_the_hosts() -> None:
    spec = graph_spec(max_length=4)
    assert pack([turn(banned_token_ids=[1, 2, 3, 4])], spec) is not None
    assert pack([turn(banned_token_ids=[1, 2, 3, 4, 5])], spec) is None


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 0.3, "presence_penalty": -1.0},
        {"logit_bias": {1: 3.0, 7: -2.0}, "banned_token_ids": [2], "repetition_penalty": 0.5},
        {"min_tokens": 4},
        {"min_tokens": 3, "logit_bias": {0: 5.0}},
        {},
    ],
)
@pytest.mark.parametrize("path", [(), (3, 9)])
def test_adjustments_make_the_processors_scores(
    options: dict[str, Any], path: tuple[int, ...]
) -> None:
    processor = LogitsProcessor(SamplingParams(**options), [1, 5, 5], end_ids=[0])
    processor.commit([1, 7])
    logits = np.random.default_rng(0).normal(0, 3, VOCAB_SIZE).astype(np.float32)
    found = processor.adjustments(path)
    assert len(set(found.token_ids.tolist())) == len(found.token_ids)
    scores = logits.copy()
    x = scores[found.token_ids] + found.bias
    weaker = np.where(x < 0, x * found.repetition, x / found.repetition)
    scores[found.token_ids] = weaker - found.penalty
    np.testing.assert_array_equal(scores, processor.scores(logits, path))
