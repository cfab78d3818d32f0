"""A request that loses its slot goes on later as if nothing had been."""

import pytest

from specexport.engines.step import Profile
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.loop import SpeculativeLoop
from tests.hash_engine import HashEngine
from tests.loop_tools import DRAFTERS, draft_model, make_request
from tests.storm_tools import POLICIES, alone, check_caches, storm_loop


@pytest.mark.parametrize("name", ["draft model, tree", "head, tree", "another draft model"])
def test_sampled_drafts_give_the_same_output_after_a_preemption(name: str) -> None:
    loop = storm_loop(DRAFTERS[name](), POLICIES["prefix cache"])
    requests = [
        make_request([i + 1] * 50, 60, temperature=1.0, seed=i, ignore_eos=True) for i in range(5)
    ]
    for request in requests:
        loop.submit(request)
    for _ in range(8):
        loop.step()
    for i in range(6):
        loop.step()
        urgent = make_request([2, i], 5, ignore_eos=True)
        urgent.priority = 5
        loop.submit(urgent)
    while loop.has_work:
        loop.step()
    assert loop.stats().num_preemptions >= 3
    for request in requests:
        assert request.output_ids == alone(name, request)


def interrupt(loop: SpeculativeLoop) -> None:
    """An urgent request takes the last one's slot and ends."""
    urgent = make_request([7], 1)
    urgent.priority = 9
    loop.submit(urgent)
    while urgent.finish_reason is None:
        loop.step()


@pytest.mark.parametrize("policy", ["no prefix cache", "prefix cache"])
@pytest.mark.parametrize("name", ["none", "head, tree", "draft model, tree"])
def test_where_and_how_often_a_request_loses_its_slot_changes_nothing(
    name: str, policy: str
) -> None:
    """In the prompt, which is scored once, and in the output; later while it catches up."""
    profile = Profile(max_slots=1, max_length=200, max_query=16)

    def found(num_steps: int | None) -> tuple[list[int], list[TokenLogprobs]]:
        engine = HashEngine(profile=profile, has_taps=True)
        loop = SpeculativeLoop(engine, DRAFTERS[name](), 3, [], POLICIES[policy])
        request = make_request(prompt, 20, temperature=1.0, seed=1, prompt_logprobs=True)
        loop.submit(request)
        for times in range(0 if num_steps is None else 3):
            for _ in range(2 if times else num_steps or 0):
                loop.step()
            interrupt(loop)
        while loop.has_work:
            loop.step()
        loop.check_integrity()
        return request.output_ids, request.prompt_logprobs

    prompt = [i % 7 + 1 for i in range(50)]
    expected = found(None)
    assert len(expected[1]) == len(prompt) - 1
    for num_steps in range(1, 14):
        assert found(num_steps) == expected


def test_a_lookup_that_steps_in_leaves_the_draft_models_cache_right() -> None:
    drafter = FirstOf(SuffixDrafter(3, 2), draft_model(salt=1))
    loop = storm_loop(drafter, POLICIES["no prefix cache"])
    for seed in range(12):
        prompt = [seed % 3 + 1, 2, 3, 4] * 3
        loop.submit(make_request(prompt, 60, temperature=0.6, seed=seed, top_k=2, ignore_eos=True))
    while loop.has_work:
        loop.step()
        check_caches(loop)


def test_a_request_that_loses_its_slot_twice_catches_up_to_where_it_was_first() -> None:
    request = make_request([1] * 50, 5)
    for num_computed in (40, 10):
        request.num_computed = num_computed
        request.give_up_slot()
    assert request.num_computed_before == 40


@pytest.mark.parametrize("name", ["none", "head, tree", "draft model, tree"])
def test_what_a_request_leaves_in_its_slot_is_kept_to_the_last_token_that_is_right(
    name: str,
) -> None:
    """Another text that begins with the whole of the interrupted one finds nothing stale."""
    for num_steps in range(2, 8):
        profile = Profile(max_slots=1, max_length=200, max_query=40)
        engine = HashEngine(profile=profile, has_taps=True)
        loop = SpeculativeLoop(engine, DRAFTERS[name](), 3, [], POLICIES["prefix cache"])
        first = make_request([i % 7 + 1 for i in range(40)], 60, ignore_eos=True)
        loop.submit(first)
        for _ in range(num_steps):
            loop.step()
        second = make_request([*first.token_ids, 5, 6], 5, temperature=1.0, ignore_eos=True)
        second.priority = 9
        loop.submit(second)
        while loop.has_work:
            loop.step()
        assert loop.stats().num_preemptions == 1
        assert first.error is second.error is None
        assert second.output_ids == alone(name, second)
        assert first.output_ids == alone(name, first)
