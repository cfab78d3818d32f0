"""What fails fails alone and once, and leaves nothing behind."""

import gc
import math
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.errors import EngineError
from specexport.runtime import stats as stats_module
from specexport.runtime.drafters.base import Drafter, NoDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.loop import SpeculativeLoop
from specexport.runtime.request import FinishReason, Request
from tests.hash_engine import VOCAB_SIZE, HashEngine
from tests.loop_tools import DRAFTERS, EOS, make_request, run
from tests.storm_tools import NUM_SLOTS, POLICIES, alone, check_caches, check_forgotten, storm_loop


@dataclass
class Faulty(HashEngine):
    """Gives NaN while told so, and cannot copy entries in the named way."""

    gives_nan: bool = False
    cannot: str = ""

    def _logits(self, step: StepInput, b: int, q: int) -> Any:
        logits = super()._logits(step, b, q)
        return logits * np.float32(np.nan) if self.gives_nan else logits

    def read_cache(self, slot: int, start: int, stop: int) -> Any:
        if self.cannot == "read_cache" and start >= 32:
            raise MemoryError
        return super().read_cache(slot, start, stop)

    def write_cache(self, slot: int, start: int, entries: Any) -> None:
        if self.cannot == "write_cache" and start >= 32:
            raise MemoryError
        super().write_cache(slot, start, entries)


def faulty_loop(drafter: Drafter, k: int = 3) -> tuple[SpeculativeLoop, Faulty]:
    profile = Profile(max_slots=NUM_SLOTS, max_length=200, max_query=40)
    engine = Faulty(profile=profile, has_taps=True)
    return SpeculativeLoop(engine, drafter, k, [EOS], POLICIES["prefix cache"]), engine


@pytest.mark.parametrize("fail_at", [3, 4])
def test_what_failed_is_not_kept_for_others(fail_at: int) -> None:
    """Not even what was computed well, in earlier steps; what others computed stays."""
    loop, engine = faulty_loop(NoDrafter(), 0)
    known = [i % 7 + 1 for i in range(64)]
    run(loop, [make_request(known, 2, ignore_eos=True)])
    before = loop.stats().prefixes.size_bytes
    engine.fail_at = {len(engine.steps) + fail_at}
    failing = make_request([*known, *range(1, 11), *([8] * 90)], 10)
    run(loop, [failing])
    assert failing.finish_reason is FinishReason.ERROR
    assert loop.stats().prefixes.size_bytes == before
    loop.check_integrity()


def test_of_a_prompt_whose_end_gives_nan_no_part_is_kept() -> None:
    """Its first part was computed in an earlier step, whose logits nobody looked at."""
    loop, engine = faulty_loop(NoDrafter(), 0)
    prompt = [i % 7 + 1 for i in range(120)]
    engine.gives_nan = True
    run(loop, [make_request(prompt, 4)])
    assert loop.stats().prefixes.size_bytes == 0
    engine.gives_nan = False
    again = make_request(prompt, 4)
    run(loop, [again])
    assert loop.stats().prefixes.num_hits == 0
    assert again.finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize("cannot", ["read_cache", "write_cache"])
@pytest.mark.parametrize("name", ["none", "head, chain", "another draft model"])
def test_copies_that_cannot_be_made_cost_time_and_nothing_else(name: str, cannot: str) -> None:
    loop, engine = faulty_loop(DRAFTERS[name]())
    prompt = [i % 7 + 1 for i in range(100)]
    run(loop, [make_request(prompt, 5, ignore_eos=True)])
    engine.cannot = cannot
    patient = [make_request([*prompt, i], 30, temperature=1.0, ignore_eos=True) for i in (1, 2, 3)]
    for request in patient:
        loop.submit(request)
    for _ in range(8):
        loop.step()
    urgent = make_request([*prompt, 4], 5, temperature=1.0, ignore_eos=True)
    urgent.priority = 1
    loop.submit(urgent)
    while loop.has_work:
        loop.step()
        loop.check_integrity()
    assert loop.stats().num_preemptions == 1
    for request in (*patient, urgent):
        assert request.error is None
        assert request.output_ids == alone(name, request)


def test_a_time_limit_is_not_held_on_to_when_its_request_has_ended() -> None:
    loop = storm_loop(NoDrafter(), POLICIES["no prefix cache"])
    for _ in range(100):
        request = make_request([1], 1)
        request.deadline_s = math.inf
        run(loop, [request])
    assert len(loop._deadlines._heap) < 50


@pytest.mark.parametrize("part", ["target.run", "target.compact", "drafter.run", "observe"])
@pytest.mark.parametrize("name", ["draft model, tree", "suffix, else a head"])
def test_a_part_that_fails_now_and_then_fails_requests_once_and_changes_no_other(
    name: str, part: str
) -> None:
    drafter = DRAFTERS[name]()
    loop = storm_loop(drafter, POLICIES["prefix cache"])
    rng = random.Random(part)
    model: Any = getattr(drafter, "_fallback", drafter)
    owner, method = {
        "target.run": (loop._target, "run"),
        "target.compact": (loop._target, "compact"),
        "drafter.run": (model._runner, "run"),
        "observe": (drafter, "observe"),
    }[part]
    works, rate = getattr(owner, method), 0.01 if part == "drafter.run" else 0.04

    def fails(*arguments: Any) -> Any:
        if rng.random() < rate:
            raise MemoryError("no room")
        return works(*arguments)

    setattr(owner, method, fails)
    ended: list[Request] = []
    requests = [
        make_request([i % 4 + 1] * 40, 20, temperature=1.0, seed=i % 5, ignore_eos=True)
        for i in range(27)
    ]
    for i, request in enumerate(requests):
        request.priority = int(i % 7 == 6)
        request.deadline_s = 0.0 if i % 9 == 8 else None
        loop.submit(request)
    while loop.has_work:
        ended += [new.request for new in loop.step() if new.request.finish_reason]
        loop.check_integrity()
        check_caches(loop)
    check_forgotten(loop)
    assert len(ended) == len(set(ended)) == len(requests)
    found = {reason: [r for r in ended if r.finish_reason is reason] for reason in FinishReason}
    assert len(found[FinishReason.TIMEOUT]) == 3
    assert {r.error for r in found[FinishReason.ERROR]} == {"MemoryError: no room"}
    assert len(found[FinishReason.LENGTH]) > 3
    for request in found[FinishReason.LENGTH]:
        assert request.output_ids == alone(name, request)


class Unreliable(HashEngine):
    """Now and then a step fails."""

    rng = random.Random(0)

    def run(self, step: StepInput) -> StepOutput:
        output = super().run(step)
        if self.rng.random() < 0.02:
            raise EngineError("the engine failed")
        return output


NUM_REQUESTS = 700
WITHOUT_TAPS = ["another draft model", "suffix with a store", "n-gram"]  # these remember no texts


@pytest.mark.parametrize("name", WITHOUT_TAPS)
def test_a_soak_in_mixed_options_loses_and_doubles_nothing_and_memory_stays_flat(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,100 requests in all; failing steps fail their own, and the loop goes on."""
    monkeypatch.setattr(stats_module, "RECENT_S", 0.01)  # else all steps of the test are recent
    rng = random.Random(name)
    profile = Profile(max_slots=NUM_SLOTS, max_length=200, max_query=40)
    policy = POLICIES["small prefix cache"]
    drafter = DRAFTERS[name]()
    loop = SpeculativeLoop(Unreliable(profile=profile), drafter, 3, [EOS], policy)
    engines = [loop._target, *([drafter._runner] if isinstance(drafter, ModelDrafter) else [])]
    running: dict[int, Request] = {}
    reasons: list[FinishReason] = []
    num_blocks = []
    while len(reasons) < NUM_REQUESTS:
        while len(running) < 12 and len(reasons) + len(running) < NUM_REQUESTS:
            request = _random_request(rng)
            running[request.id] = request
            loop.submit(request)
        if rng.random() < 0.02:
            loop.cancel(rng.choice(list(running.values())))
        loop.step()
        for engine in engines:
            assert isinstance(engine, HashEngine)
            engine.steps.clear()
        for request in [r for r in running.values() if r.finish_reason is not None]:
            reasons.append(running.pop(request.id).finish_reason or FinishReason.ERROR)
            assert request.error in (None, "the engine failed")
            if len(reasons) in (NUM_REQUESTS // 2, NUM_REQUESTS):
                gc.collect()
                num_blocks.append(sys.getallocatedblocks())
    assert not loop.has_work
    loop.check_integrity()
    check_forgotten(loop)
    assert loop.stats().num_finished == NUM_REQUESTS
    assert {FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.LENGTH} <= set(reasons)
    # 350 more requests: one small object kept of each would show.
    assert num_blocks[1] - num_blocks[0] < NUM_REQUESTS // 2


def _random_request(rng: random.Random) -> Request:
    prompt = [i % VOCAB_SIZE for i in range(rng.choice([0, 10, 60]))]
    prompt += [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
    request = make_request(
        prompt,
        rng.randrange(1, 40),
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.randrange(100),
        top_k=rng.choice([0, 3]),
        logprobs=rng.random() < 0.1,
        prompt_logprobs=rng.random() < 0.1,
        repetition_penalty=rng.choice([1.0, 1.2]),
        stop_token_ids=(rng.choice([5, 9]),) if rng.random() < 0.1 else (),
    )
    request.priority = rng.choice([0, 0, 0, 1, 2])
    return request
