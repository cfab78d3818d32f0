"""What was computed before is not computed again, and changes no output."""

import pytest

from specexport.engines.step import Profile
from specexport.runtime.drafters.base import NoDrafter
from specexport.runtime.loop import SpeculativeLoop
from tests.hash_engine import HashEngine
from tests.loop_tools import DRAFTERS, head, make_request, run
from tests.storm_tools import POLICIES, alone, storm_loop


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_a_prompt_that_was_computed_before_is_not_computed_again(name: str) -> None:
    loop = storm_loop(DRAFTERS[name](), POLICIES["prefix cache"])
    first = make_request([i % 7 + 1 for i in range(100)], 20, ignore_eos=True)
    run(loop, [first])
    text = [*first.token_ids, 3, 4]
    second = make_request(text, 10, temperature=1.0, ignore_eos=True)
    run(loop, [second])
    assert loop.stats().prefixes.num_hits == 1
    # A head that drafts in every step is behind by what its last step accepted.
    assert loop.stats().prefixes.num_reused_tokens >= len(text) - 2 - 1 - 5
    assert second.output_ids == alone(name, second)


def test_requests_that_begin_alike_and_come_together_compute_it_once() -> None:
    profile = Profile(max_slots=4, max_length=200, max_query=200)
    engine = HashEngine(profile=profile, has_taps=True)
    loop = SpeculativeLoop(engine, head(), 0, [], POLICIES["prefix cache"])
    prompt = [i % 11 for i in range(150)]
    run(loop, [make_request([*prompt, i], 3, ignore_eos=True) for i in range(4)])
    computed = sum(int(step.input_ids.size) for step in engine.steps)
    assert computed < 2 * len(prompt)
    assert loop.stats().prefixes.num_hits == 3


def test_a_request_that_wants_all_logits_waits_for_no_other_to_compute_them() -> None:
    loop = storm_loop(NoDrafter(), POLICIES["prefix cache"], 0)
    prompt = [i % 7 + 1 for i in range(100)]
    first, scored = make_request(prompt, 2), make_request([*prompt, 1], 2, prompt_logprobs=True)
    loop.submit(first)
    loop.step()
    loop.submit(scored)
    while not first.num_output:
        loop.step()
    assert scored.slot >= 0
