"""The loop on an engine that hashes the whole cached prefix: nothing may change the tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.engines.step import Profile
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, NoDrafter
from specexport.runtime.drafters.medusa import MedusaDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.growth import DynamicTree, StaticTree
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason
from specexport.runtime.token_map import TokenMap
from tests.hash_engine import VOCAB_SIZE, HashEngine, graph_spec
from tests.loop_tools import (
    DETERMINISTIC,
    DRAFTERS,
    EOS,
    TREES,
    HashMedusa,
    Oracle,
    draft_model,
    head,
    make_loop,
    make_request,
    medusa,
    next_token,
    plain_output,
    prompts,
    run,
)


@pytest.mark.parametrize("name", DRAFTERS)
@given(prompts=prompts, k=st.integers(0, 8), max_tokens=st.integers(1, 30))
@settings(max_examples=25)
def test_greedy_output_is_the_definitions(
    name: str, prompts: list[list[int]], k: int, max_tokens: int
) -> None:
    """More requests than slots, prompts longer than a step, every K, rows that join and leave."""
    loop = make_loop(DRAFTERS[name](), k, [EOS])
    requests = [make_request(prompt, max_tokens + i % 3) for i, prompt in enumerate(prompts)]
    reported = run(loop, requests)
    for request, prompt in zip(requests, prompts, strict=True):
        expected = plain_output(prompt, request.params, request.max_tokens)
        assert request.output_ids == reported[request.id] == expected
        reason = FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH
        assert request.finish_reason == reason


@pytest.mark.parametrize("name", DETERMINISTIC)
@given(prompts=prompts, k=st.integers(0, 8))
@settings(max_examples=15)
def test_seeded_output_depends_on_neither_batch_nor_deterministic_drafts(
    name: str, prompts: list[list[int]], k: int
) -> None:
    loop = make_loop(DRAFTERS[name](), k, [EOS])
    requests = [
        make_request(p, 25, temperature=0.9, top_k=i % 4 * 2, seed=i) for i, p in enumerate(prompts)
    ]
    run(loop, requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == plain_output(prompt, request.params, 25)


@pytest.mark.parametrize(
    "drafter",
    [
        lambda: draft_model(salt=1),
        lambda: draft_model(1, tree="tree"),
        lambda: head("tree", salt=1),
    ],
    ids=["draft model", "draft model, tree", "head, tree"],
)
def test_seeded_output_with_sampled_drafts_is_the_same_alone_and_in_a_batch(
    drafter: Callable[[], Drafter],
) -> None:
    prompts = [[1, 2, 3], [5], list(range(12)) * 2, [7, 7, 7, 7], [2, 9], [4]]

    def outputs(groups: list[list[int]]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for group in groups:
            loop = make_loop(drafter(), 3, [EOS])
            requests = [make_request(prompts[i], 30, temperature=1.0, seed=i) for i in group]
            run(loop, requests)
            found |= {i: r.output_ids for i, r in zip(group, requests, strict=True)}
        return [found[i] for i in range(len(prompts))]

    assert outputs([[0, 1, 2, 3, 4, 5]]) == outputs([[i] for i in range(len(prompts))])


EQUALS: dict[str, Callable[[], Drafter]] = {
    "draft model": draft_model,
    "draft model, tree": lambda: draft_model(tree="tree"),
    "head": head,
    "head, tree": lambda: head("tree"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", EQUALS)
def test_a_drafter_that_is_the_target_is_never_rejected(name: str, temperature: float) -> None:
    """In a tree, the first child of each node is accepted, down to the last level."""
    loop = make_loop(EQUALS[name](), 4)
    requests = [
        make_request([i, 3, i][: 1 + i % 3], 40, temperature=temperature, seed=i) for i in range(7)
    ]
    run(loop, requests)
    acceptance = loop.stats().acceptance
    assert acceptance.num_drafts > 30
    assert acceptance.accepted == acceptance.proposed


def test_medusa_heads_that_know_the_target_are_never_rejected() -> None:
    loop = make_loop(medusa(), 3)
    run(loop, [make_request([i, 3, i], 40) for i in range(7)])
    acceptance = loop.stats().acceptance
    assert acceptance.num_drafts > 30
    assert acceptance.accepted == acceptance.proposed


def test_a_dynamic_tree_of_the_target_holds_its_first_token_and_mostly_the_path() -> None:
    loop = make_loop(head("dynamic tree"), 3)
    run(loop, [make_request([i, 3, i], 40) for i in range(7)])
    first, second, third = loop.stats().acceptance.rate_per_position
    assert first == 1.0
    assert min(second, third) > 0.7


@pytest.mark.parametrize("shape", [(5, 4, 6), (3, 3, 3), (4, 2, 12)])
def test_a_draft_model_keeps_its_cache_whatever_was_left_out_of_its_tree(
    shape: tuple[int, int, int],
) -> None:
    """It is the target, and the likeliest first token is never left out."""
    runner = HashEngine(profile=Profile(max_slots=4, max_length=200, max_query=16))
    drafter = ModelDrafter(runner, DynamicTree(*shape), TokenMap(VOCAB_SIZE))
    loop = SpeculativeLoop(HashEngine(), drafter, shape[0], [], Policy(12))
    run(loop, [make_request([i, 3], 60) for i in range(6)])
    acceptance = loop.stats().acceptance
    assert acceptance.accepted[0] == acceptance.proposed[0] > 60


def test_a_drafter_that_gives_nan_drafts_nothing_and_harms_no_one() -> None:
    class Nan(HashEngine):
        def run(self, step: Any) -> Any:
            output = super().run(step)
            output.logits[:] = np.nan
            return output

    for grower in TREES.values():
        profile = Profile(max_slots=4, max_length=200, max_query=16)
        drafter = ModelDrafter(Nan(profile=profile), grower, TokenMap(VOCAB_SIZE))
        loop = SpeculativeLoop(HashEngine(), drafter, 3, [], Policy(8))
        requests = [
            make_request([i], 9, temperature=i / 2, seed=i, ignore_eos=True) for i in range(3)
        ]
        run(loop, requests)
        for i, request in enumerate(requests):
            assert request.output_ids == plain_output([i], request.params, 9)
        assert loop.stats().acceptance.num_drafts == 0


@pytest.mark.parametrize("length", [1, 2])
def test_a_head_drafts_from_the_second_token_on_whatever_the_prompt(length: int) -> None:
    loop = make_loop(head(), 4)
    run(loop, [make_request([5] * length, 11)])
    assert loop.stats().num_steps == 1 + 2  # plain, then twice five tokens
    assert loop.stats().acceptance.num_drafts == 2


def test_a_head_with_a_shorter_context_stops_drafting_and_decoding_goes_on() -> None:
    loop = make_loop(head(max_length=20), 4)
    request = make_request([1, 2, 3, 4], 60)
    run(loop, [request])
    assert request.output_ids == plain_output([1, 2, 3, 4], SamplingParams(ignore_eos=True), 60)
    assert 0 < request.stats.acceptance.num_drafts < 10


def test_a_ragged_tree_never_accepts_its_padding() -> None:
    """The target's best token is 0, which padded paths hold elsewhere."""

    class Zero(HashEngine):
        def _logits(self, step: Any, b: int, q: int) -> Any:
            super()._logits(step, b, q)
            return np.eye(VOCAB_SIZE, dtype=np.float32)[0]

    class Heads(HashMedusa):
        def run(self, hidden_states: Any) -> Any:  # token 0 is no candidate
            logits = np.tile(np.arange(VOCAB_SIZE, dtype=np.float32), (len(hidden_states), 3, 1))
            return logits

    drafter = MedusaDrafter(Heads(), StaticTree([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]))
    loop = SpeculativeLoop(Zero(has_taps=True), drafter, 3, [], Policy(5))
    request = make_request([3, 1], 12)
    run(loop, [request])
    assert request.output_ids == [0] * 12
    assert request.stats.acceptance.accepted == [0, 0, 0]


def test_rows_that_cannot_draft_yet_run_beside_a_tree() -> None:
    """A long prompt is still being computed while another request's tree is verified."""
    loop = make_loop(head("tree"), 3)
    first, second = make_request([1, 2], 40), make_request(list(range(12)) * 9, 12)
    loop.submit(first)
    for _ in range(3):
        loop.step()
    loop.submit(second)
    while loop.has_work:
        loop.step()
    for request, prompt in ((first, [1, 2]), (second, list(range(12)) * 9)):
        params = SamplingParams(ignore_eos=True)
        assert request.output_ids == plain_output(prompt, params, request.max_tokens)
        assert request.stats.acceptance.accepted == request.stats.acceptance.proposed


@pytest.mark.parametrize(
    ("wrong_every", "expected"), [(0, [1, 1, 1, 1]), (1, [0] * 4), (3, [1, 1, 0, 0])]
)
def test_acceptance_is_counted_per_position(wrong_every: int, expected: list[int]) -> None:
    loop = SpeculativeLoop(HashEngine(), Oracle(wrong_every=wrong_every), 4, [])
    run(loop, [make_request([1, 2], 60)])
    assert loop.stats().acceptance.rate_per_position == expected


def test_an_accepted_run_ends_at_an_end_of_sequence_token_inside_it() -> None:
    """Declare the token of any step to be the end: the output must be cut exactly there."""
    prompt = [1, 2, 3]
    free = plain_output(prompt, SamplingParams(ignore_eos=True), 24)
    for eos in set(free):
        for k in range(9):
            loop = SpeculativeLoop(HashEngine(), Oracle(), k, [eos])
            request = make_request(prompt, 24)
            run(loop, [request])
            assert request.output_ids == free[: free.index(eos) + 1]
            assert request.finish_reason is FinishReason.STOP


def test_max_tokens_cuts_an_accepted_run_exactly() -> None:
    for max_tokens in range(1, 12):
        loop = SpeculativeLoop(HashEngine(), Oracle(), 8, [])
        request = make_request([4], max_tokens)
        run(loop, [request])
        assert request.num_output == max_tokens
        assert request.finish_reason is FinishReason.LENGTH


def test_a_rejected_end_of_sequence_draft_does_not_end_the_request() -> None:
    class Ends(NoDrafter):
        def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft.certain([EOS] * w.max_tokens) for w in wanted]

    loop = SpeculativeLoop(HashEngine(), Ends(), 3, [EOS])
    request = make_request([5, 5], 20)
    run(loop, [request])
    assert request.output_ids == plain_output([5, 5], request.params, 20)


def test_ignore_eos_goes_on() -> None:
    loop = SpeculativeLoop(HashEngine(), Oracle(), 4, range(VOCAB_SIZE))
    request = make_request([3], 15, ignore_eos=True)
    run(loop, [request])
    assert request.num_output == 15


def test_a_failing_step_fails_its_requests_and_the_loop_goes_on() -> None:
    engine = HashEngine(fail_at={3})
    loop = SpeculativeLoop(engine, NgramDrafter(1, 2), 2, [])
    failed = [make_request([i], 10) for i in range(3)]
    run(loop, failed)
    assert {r.finish_reason for r in failed} == {FinishReason.ERROR}
    assert failed[0].error == "the fake engine was told to fail"
    later = make_request([1, 2], 10)
    run(loop, [later])
    assert later.output_ids == plain_output([1, 2], SamplingParams(ignore_eos=True), 10)


def test_nan_logits_end_only_the_request_that_has_them() -> None:
    class Poisoned(HashEngine):
        def run(self, step: Any) -> Any:
            output = super().run(step)
            if step.input_ids[0, 0] == 11:
                output.logits[0] = np.nan
            return output

    loop = SpeculativeLoop(Poisoned(), NoDrafter(), 0, [])
    bad, good = make_request([11], 5), make_request([2], 5)
    run(loop, [bad, good])
    assert bad.finish_reason is FinishReason.ERROR
    assert "logit that is nan" in (bad.error or "")
    assert good.output_ids == plain_output([2], SamplingParams(ignore_eos=True), 5)


def test_an_unexpected_error_in_one_row_leaves_the_others_alone() -> None:
    class Breaks(NoDrafter):
        def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
            bad = Draft((1,), (-1,), ())  # its distribution is missing
            return [bad if w.request.num_prompt == 1 else Draft() for w in wanted]

    loop = SpeculativeLoop(HashEngine(), Breaks(), 1, [])
    bad, good = make_request([3], 5), make_request([2, 2], 5)
    run(loop, [bad, good])
    assert bad.finish_reason is FinishReason.ERROR
    assert "IndexError" in (bad.error or "")
    assert good.output_ids == plain_output([2, 2], SamplingParams(ignore_eos=True), 5)


def test_speed_counts_what_came_after_the_first_step() -> None:
    loop = SpeculativeLoop(HashEngine(), Oracle(), 8, [])
    one_step, several = make_request([4], 5), make_request([5], 30)
    run(loop, [one_step, several])
    assert one_step.stats.num_decode_steps == 0
    assert one_step.stats.tokens_per_s(5) == 0.0
    assert several.stats.num_first_tokens == 9
    expected = 21 / several.stats.decode_time_s
    assert several.stats.tokens_per_s(30) == pytest.approx(expected)


def test_before_the_end_there_is_no_speed_yet() -> None:
    loop = SpeculativeLoop(HashEngine(), NoDrafter(), 0, [])
    request = make_request([4], 5)
    loop.submit(request)
    for _ in range(3):
        loop.step()
    assert request.stats.num_decode_steps == 2
    assert request.stats.tokens_per_s(3) == 0.0


def test_a_cancelled_request_frees_its_slot_and_leaves_the_others_alone() -> None:
    loop = SpeculativeLoop(HashEngine(), draft_model(salt=1), 3, [])
    requests = [make_request([i, 1], 20) for i in range(6)]
    for request in requests:
        loop.submit(request)
    for _ in range(3):
        loop.step()
    loop.cancel(requests[1])  # runs
    loop.cancel(requests[5])  # waits
    while loop.has_work:
        loop.step()
    for i in (0, 2, 3, 4):
        assert requests[i].output_ids == plain_output([i, 1], SamplingParams(ignore_eos=True), 20)
    assert requests[1].finish_reason is requests[5].finish_reason is FinishReason.CANCELLED
    assert loop.stats().num_running == loop.stats().num_waiting == 0


def test_a_draft_model_with_a_shorter_context_stops_drafting_and_decoding_goes_on() -> None:
    loop = SpeculativeLoop(HashEngine(), draft_model(max_length=20), 4, [])
    request = make_request([1, 2, 3, 4], 60)
    run(loop, [request])
    assert request.output_ids == plain_output([1, 2, 3, 4], SamplingParams(ignore_eos=True), 60)
    assert 0 < request.stats.acceptance.num_drafts < 10


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 3, VOCAB_SIZE + 5])
def test_padding_ids_of_one_vocabulary_are_never_drafted(vocab_size: int) -> None:
    loop = SpeculativeLoop(HashEngine(), draft_model(salt=3, vocab_size=vocab_size), 4, [])
    requests = [make_request([i], 30, temperature=1.0, seed=i) for i in range(4)]
    run(loop, requests)
    assert loop.stats().acceptance.num_drafts > 0
    assert all(0 <= t < VOCAB_SIZE for r in requests for t in r.token_ids)


def test_a_sliding_window_hides_what_is_too_old() -> None:
    engine = HashEngine(spec=graph_spec(sliding_window=8))
    loop = SpeculativeLoop(engine, Oracle(suffix=8), 3, [])
    request = make_request([1, 2, 3], 20)
    run(loop, [request])
    text = [1, 2, 3]
    while len(text) < 23:
        text.append(next_token(text, request.params, suffix=8))
    assert request.token_ids == text
    assert request.stats.acceptance.rate == 1.0
