"""Request options through the loop: with any drafter what plain decoding with them gives."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specexport.export.methods import (
    Acceptance,
    LosslessAcceptance,
    TopAcceptance,
    TypicalAcceptance,
)
from specexport.runtime.commit import Committer
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, NoDrafter
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.lossy import LogitsAt
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.token_map import TokenMap
from specexport.runtime.tree import ROOT
from specexport.runtime.verify import Verdict
from tests.hash_engine import VOCAB_SIZE, HashEngine, hash_logits
from tests.loop_tools import TREES, draft_model, head, make_loop, make_request, medusa, run
from tests.reference_options import (
    plain_decoding,
    reference_probs,
    reference_scores,
    request_options,
)

EOS = 0
PROMPTS = [[1, 2, 3], [5], list(range(12)) * 2, [7, 7, 7, 7], [2, 9], [4]]


class Script(NoDrafter):
    """Proposes the output that the test says will come, with some tokens off by one."""

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], wrong_every: int = 0) -> None:
        self._outputs, self._wrong_every = outputs, wrong_every

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft.certain(self._guess(w)) for w in wanted]

    def _guess(self, wanted: DraftRequest) -> list[int]:
        request = wanted.request
        output = self._outputs[tuple(request.token_ids[: request.num_prompt])]
        tokens = output[request.num_output :][: wanted.max_tokens]
        return [
            (t + 1) % VOCAB_SIZE if self._wrong_every and (i + 1) % self._wrong_every == 0 else t
            for i, t in enumerate(tokens)
        ]


DRAFTERS: dict[str, Callable[[dict[tuple[int, ...], list[int]]], Drafter]] = {
    "none": lambda outputs: NoDrafter(),
    "n-gram": lambda outputs: NgramDrafter(1, 3),
    "suffix": lambda outputs: SuffixDrafter(1, 4),
    "always right": Script,
    "sometimes right": lambda outputs: Script(outputs, 3),
    "always wrong": lambda outputs: Script(outputs, 1),
    "draft model": lambda outputs: draft_model(salt=1),
    "the target as draft model": lambda outputs: draft_model(),
    "draft model, tree": lambda outputs: draft_model(salt=1, tree="tree"),
    "draft model, dynamic tree": lambda outputs: draft_model(salt=1, tree="dynamic tree"),
    "head, tree": lambda outputs: head("tree", salt=1),
    "head that is the target": lambda outputs: head(),
    "medusa": lambda outputs: medusa(salt=1),
    "medusa, right": lambda outputs: medusa(),
    "suffix, else a head": lambda outputs: FirstOf(SuffixDrafter(2, 2), head("tree", salt=1)),
}
DETERMINISTIC = (
    "none",
    "n-gram",
    "suffix",
    "sometimes right",
    "medusa",
    "draft model, dynamic tree",
)


def expect(prompt: list[int], max_tokens: int, options: dict[str, Any]) -> list[int]:
    return plain_decoding(hash_logits, prompt, SamplingParams(**options), max_tokens, [EOS])


def check_batch(name: str, k: int, max_tokens: int, batch: Sequence[dict[str, Any]]) -> None:
    """A mixed batch, with more requests than slots, gives each what plain decoding gives it."""
    prompts = [PROMPTS[i % len(PROMPTS)] + [i] * (i % 3) for i in range(len(batch))]
    expected = [expect(p, max_tokens, o) for p, o in zip(prompts, batch, strict=True)]
    outputs = {tuple(p): e for p, e in zip(prompts, expected, strict=True)}
    loop = make_loop(DRAFTERS[name](outputs), k, [EOS])
    requests = [make_request(p, max_tokens, **o) for p, o in zip(prompts, batch, strict=True)]
    reported = run(loop, requests)
    for request, output in zip(requests, expected, strict=True):
        assert request.output_ids == reported[request.id] == output
        ends = {EOS, *request.params.stop_token_ids}
        reason = FinishReason.STOP if output[-1] in ends else FinishReason.LENGTH
        assert request.finish_reason == reason
        assert request.stopped_by == (output[-1] if output[-1] in ends else None)


SINGLE: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "frequency penalty": {"frequency_penalty": 1.1},
    "presence penalty": {"presence_penalty": 2.0},
    "negative frequency penalty": {"frequency_penalty": -0.8},
    "bias": {"logit_bias": {3: 4.0, 7: -6.0}},
    "allowed tokens": {"allowed_token_ids": [0, 2, 4, 6, 8]},
    "banned tokens": {"banned_token_ids": [1, 5, 9]},
    "min tokens": {"min_tokens": 17},
    "stop tokens": {"stop_token_ids": [3, 8]},
    "ignore end of sequence": {"ignore_eos": True},
}


@pytest.mark.parametrize("option", SINGLE)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_with_an_option_is_the_same_with_and_without_speculation(
    name: str, option: str
) -> None:
    check_batch(name, 4, 24, [SINGLE[option]] * 3)


@pytest.mark.parametrize("name", DRAFTERS)
@given(
    batch=st.lists(request_options(VOCAB_SIZE, [EOS], greedy=True), min_size=1, max_size=6),
    k=st.integers(0, 8),
    max_tokens=st.integers(12, 25),
)
@settings(max_examples=10)
def test_greedy_with_any_options_in_a_mixed_batch_is_plain_decodings(
    name: str, batch: list[dict[str, Any]], k: int, max_tokens: int
) -> None:
    check_batch(name, k, max_tokens, batch)


@pytest.mark.parametrize("name", DETERMINISTIC)
@given(
    batch=st.lists(request_options(VOCAB_SIZE, [EOS], greedy=False), min_size=1, max_size=6),
    k=st.integers(0, 8),
)
@settings(max_examples=10)
def test_seeded_output_with_any_options_depends_on_neither_batch_nor_deterministic_drafts(
    name: str, batch: list[dict[str, Any]], k: int
) -> None:
    check_batch(name, k, 20, batch)


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_seeded_output_with_sampled_drafts_and_options_is_the_same_alone_and_in_a_batch(
    tree: str,
) -> None:
    options: list[dict[str, Any]] = [
        {"frequency_penalty": 1.0},
        {"min_p": 0.1},
        {"typical_p": 0.8, "repetition_penalty": 1.3},
        {"top_k": 5, "top_p": 0.9, "presence_penalty": 0.5},
        {"banned_token_ids": [1, 2], "logit_bias": {5: 2.0}},
        {"min_tokens": 20},
    ]

    def outputs(groups: list[list[int]]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for group in groups:
            loop = make_loop(draft_model(salt=1, tree=tree), 3, [EOS])
            requests = [
                make_request(PROMPTS[i], 30, temperature=1.0, seed=i, **options[i]) for i in group
            ]
            run(loop, requests)
            found |= {i: r.output_ids for i, r in zip(group, requests, strict=True)}
        return [found[i] for i in range(len(PROMPTS))]

    assert outputs([[0, 1, 2, 3, 4, 5]]) == outputs([[i] for i in range(len(PROMPTS))])


class Checked(Committer):
    """Compares the distribution at every node of every draft, accepted or not."""

    num_checked = 0

    def _verify(self, request: Request, draft: Draft, logits_at: LogitsAt) -> Verdict:
        params, prompt = request.params, request.token_ids[: request.num_prompt]
        ends = {*(() if params.ignore_eos else [EOS]), *params.stop_token_ids}
        for node in range(ROOT, len(draft)):
            text = [*request.token_ids, *draft.path(node)]
            scores = reference_scores(hash_logits(text), params, prompt, text, ends)
            found = request.processor.distribution(logits_at(node), draft.path(node))
            probs = [found.prob(token_id) for token_id in range(VOCAB_SIZE)]
            # Penalties round once or twice in single precision.
            np.testing.assert_allclose(probs, reference_probs(scores, params), atol=1e-5)
            self.num_checked += 1
        return super()._verify(request, draft, logits_at)


@pytest.mark.parametrize("name", ["draft model, tree", "head, tree", "medusa", "n-gram"])
@given(
    batch=st.lists(request_options(VOCAB_SIZE, [EOS], greedy=False), min_size=1, max_size=4),
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20), min_size=4, max_size=4
    ),
)
@settings(max_examples=10)
def test_the_target_at_each_node_of_a_step_is_plain_decodings_at_its_prefix(
    name: str, batch: list[dict[str, Any]], prompts: list[list[int]]
) -> None:
    loop = SpeculativeLoop(HashEngine(has_taps=True), DRAFTERS[name]({}), 3, [EOS], Policy(8))
    checked = Checked(
        loop._target, loop._drafter, LosslessAcceptance(), loop._lengths, loop._counters
    )
    loop._committer = checked
    requests = [make_request(p, 12, **o) for p, o in zip(prompts, batch, strict=False)]
    run(loop, requests)
    assert not any(request.error for request in requests)
    assert checked.num_checked >= len(requests)


class Similar(HashEngine):
    """A draft model whose distribution is near the target's, and another."""

    def _logits(self, step: Any, b: int, q: int) -> Any:
        text = self._checked(step, b, q)
        return (0.7 * hash_logits(text) + 0.3 * hash_logits(text, salt=4)).astype(np.float32)


FALSE_ALARM_RATE = 1e-5  # of each case, over the choice of the seeds, which are fixed
SAMPLED: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.85},
    "min-p": {"min_p": 0.08},
    "typical-p": {"typical_p": 0.6},
    "penalties": {
        "repetition_penalty": 1.7,
        "frequency_penalty": 1.5,
        "presence_penalty": 1.0,
        "top_k": 4,
        "temperature": 1.3,
    },
    "bias and masks": {
        "logit_bias": {3: 2.0, 7: 1.0},
        "banned_token_ids": [1, 2, 11],
        "top_k": 4,
        "min_tokens": 2,
        "stop_token_ids": [5],
    },
}


@pytest.mark.parametrize(
    ("option", "tree"), [*((o, "chain") for o in SAMPLED), ("penalties", "tree"), ("min-p", "tree")]
)
def test_pairs_of_tokens_sampled_through_speculation_follow_the_reference(
    option: str, tree: str
) -> None:
    """χ² over the first two tokens; the draft model's distribution is another."""
    options, prompt, num_samples = {"temperature": 1.0, **SAMPLED[option]}, [3, 7, 3], 1000
    loop = make_loop(ModelDrafter(Similar(), TREES[tree], TokenMap(VOCAB_SIZE)), 3, [EOS])
    requests = [make_request(prompt, 3, seed=seed, **options) for seed in range(num_samples)]
    run(loop, requests)
    counts = Counter(tuple(request.output_ids[:2]) for request in requests)
    params, expected = SamplingParams(**options), dict[tuple[int, ...], float]()
    ends = {EOS, *params.stop_token_ids}
    for first, p in enumerate(reference_at(params, prompt, [], ends)):
        if first in ends:
            expected[(first,)] = p
        elif p:
            after = reference_at(params, prompt, [first], ends)
            expected |= {(first, second): p * q for second, q in enumerate(after)}
    common = [pair for pair, p in expected.items() if p * num_samples >= 5]
    rest = num_samples - sum(counts[pair] for pair in common)
    observed = [*(counts[pair] for pair in common), rest]
    frequencies = [expected[pair] * num_samples for pair in common]
    frequencies.append(num_samples - sum(frequencies))
    if frequencies[-1] < 5:  # too rare for a cell; impossible pairs must not come at all
        assert all(expected.get(pair, 0.0) > 0 for pair in counts)
        observed, frequencies = observed[:-1], frequencies[:-1]
        frequencies = [f * sum(observed) / sum(frequencies) for f in frequencies]
    assert len(frequencies) >= 6
    assert stats.chisquare(observed, frequencies).pvalue > FALSE_ALARM_RATE
    # Drafts are accepted and rejected often, at both positions.
    assert all(0.1 < rate < 0.98 for rate in loop.stats().acceptance.rate_per_position)


def reference_at(params: SamplingParams, prompt: list[int], output: list[int], ends: Any) -> Any:
    text = [*prompt, *output]
    scores = reference_scores(hash_logits(text), params, prompt, text, ends)
    return reference_probs(scores, params)


def test_an_accepted_run_ends_at_a_stop_token_before_max_tokens_cuts_it() -> None:
    """Run [10, 11, STOP, 20, 21, 22] with at most 5 tokens gives [10, 11, STOP]."""
    prompt = [1, 2, 3]
    free = plain_decoding(hash_logits, prompt, SamplingParams(ignore_eos=True), 12)
    first_at = [free.index(t) for t in free]
    place = next(i for i in range(2, 5) if first_at[i] == i)
    for max_tokens in range(1, 9):
        loop = make_loop(Script({tuple(prompt): free}), 8)
        request = make_request(prompt, max_tokens, stop_token_ids=[free[place]])
        run(loop, [request])
        is_stopped = max_tokens > place
        assert request.output_ids == free[: min(max_tokens, place + 1)]
        reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        assert request.finish_reason is reason


@pytest.mark.parametrize("min_tokens", range(1, 14))
def test_min_tokens_counts_tokens_not_steps(min_tokens: int) -> None:
    """Once allowed, a biased end of sequence comes at once: after exactly `min_tokens`."""
    options: dict[str, Any] = {"min_tokens": min_tokens, "logit_bias": {EOS: 100.0}}
    expected = expect([4, 4], 20, options)
    assert len(expected) == min_tokens + 1
    loop = make_loop(Script({(4, 4): expected}), 8, [EOS])
    request = make_request([4, 4], 20, **options)
    run(loop, [request])
    assert request.output_ids == expected
    assert request.stats.acceptance.num_drafts == -(-(min_tokens + 1) // 9)


def test_a_drafted_token_that_an_option_rules_out_is_rejected() -> None:
    """The model's own favourite is drafted every time; the option forbids it."""
    favourite = int(hash_logits([6, 6]).argmax())
    loop = make_loop(Script({(6, 6): [favourite] * 20}), 3)
    request = make_request([6, 6], 8, banned_token_ids=[favourite])
    run(loop, [request])
    assert favourite not in request.output_ids
    assert sum(request.stats.acceptance.accepted) == 0


RULES: dict[str, Acceptance] = {
    "typical": TypicalAcceptance(epsilon=0.05, delta=0.2),
    "top": TopAcceptance(n=12, delta=1.0),
}


@pytest.mark.parametrize("name", ["draft model", "draft model, tree", "medusa"])
@pytest.mark.parametrize("rule", RULES)
def test_lossy_acceptance_keeps_to_what_the_options_rule_out(rule: str, name: str) -> None:
    options: dict[str, Any] = {
        "banned_token_ids": [1, 2, 3, 4],
        "min_tokens": 15,
        "temperature": 1.0,
        "frequency_penalty": 0.5,
    }
    engine = HashEngine(has_taps=True)
    loop = SpeculativeLoop(engine, DRAFTERS[name]({}), 3, [EOS], Policy(8, RULES[rule]))
    requests = [make_request([i, 5, i], 24, seed=i, **options) for i in range(5, 12)]
    run(loop, requests)
    for request in requests:
        assert request.error is None
        assert not {1, 2, 3, 4} & set(request.output_ids)
        assert EOS not in request.output_ids[:15]
        assert request.num_output >= 15
    assert sum(loop.stats().acceptance.accepted) > 0
