"""Random arrivals, cancellations, deadlines, preemptions and failures: nothing leaks or changes."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specexport.engines.step import Profile, StepInput
from specexport.runtime.commit import NewTokens
from specexport.runtime.drafters.base import Drafter, NoDrafter
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.lengths import ANY_WIDTH, DraftSize, FixedLength, RowState
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.picking import raced
from specexport.runtime.request import FinishReason, Request
from tests.hash_engine import VOCAB_SIZE, HashEngine
from tests.loop_tools import DETERMINISTIC, DRAFTERS, EOS, draft_model, head, make_request, run

# Drafts that are drawn at random: their output is seeded, but not that of plain decoding.
SAMPLED = [name for name in DRAFTERS if name not in DETERMINISTIC]
NUM_SLOTS = 3
POLICIES = {
    "no prefix cache": Policy(8),
    "small prefix cache": Policy(8, max_prefix_bytes=3000),
    "prefix cache": Policy(8, max_prefix_bytes=2**20),
}


# Those whose drafts are certain: how large they are can then change no output.
CERTAIN: dict[str, Callable[[], Drafter]] = {
    **{name: DRAFTERS[name] for name in ("medusa", "n-gram", "suffix", "sometimes right")},
    "draft model, chain": lambda: draft_model(salt=1, make_picker=raced),
    "draft model, tree": lambda: draft_model(salt=1, tree="tree", make_picker=raced),
    "head, chain": lambda: head(salt=1, make_picker=raced),
    "head, tree": lambda: head("tree", make_picker=raced),
    "head, dynamic tree": lambda: head("dynamic tree", salt=1, make_picker=raced),
    "suffix, else a head": lambda: FirstOf(SuffixDrafter(2, 2), head("tree", make_picker=raced)),
}


class AnyLength(FixedLength):
    """Drafts of any size, none at all included; remembers which requests have not ended."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self._rng = random.Random(seed)
        self.open: set[int] = set()

    def choose(self, rows: Sequence[RowState]) -> list[DraftSize]:
        self.open |= {row.request_id for row in rows}
        widths = 1, 2, ANY_WIDTH
        return [
            DraftSize(self._rng.randint(0, row.max_depth), self._rng.choice(widths)) for row in rows
        ]

    def release(self, request_id: int) -> None:
        self.open.discard(request_id)


def storm_loop(drafter: Drafter, policy: Policy, k: int = 3) -> SpeculativeLoop:
    profile = Profile(max_slots=NUM_SLOTS, max_length=200, max_query=40)
    return SpeculativeLoop(HashEngine(profile=profile, has_taps=True), drafter, k, [EOS], policy)


def alone(name: str, request: Request) -> list[int]:
    """The same request on a loop of its own, without a prefix cache."""
    loop = storm_loop(DRAFTERS[name](), POLICIES["no prefix cache"])
    twin = make_request(request.token_ids[: request.num_prompt], request.max_tokens)
    twin.params = request.params
    run(loop, [twin])
    return twin.output_ids


PROMPTS = st.builds(
    lambda common, tail: [i % VOCAB_SIZE for i in range(common)] + tail,
    st.sampled_from([0, 5, 40, 70]),
    st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=40),
)


class Storm(RuleBasedStateMachine):
    """Whatever happens, each request's output is what it gets alone, or a beginning of that."""

    @initialize(name=st.sampled_from(sorted(DRAFTERS)), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, name: str, policy: str) -> None:
        self.name = name
        self.loop = storm_loop(DRAFTERS[name](), POLICIES[policy])
        self.requests: list[Request] = []
        self.reported: dict[int, list[NewTokens]] = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.sampled_from([0, 0, 0, 1]),
        prompt_logprobs=st.sampled_from([False, False, True]),
        seed=st.integers(0, 3),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        priority: int,
        prompt_logprobs: bool,
        seed: int,
    ) -> None:
        request = make_request(
            prompt,
            max_tokens,
            temperature=temperature,
            seed=seed,
            prompt_logprobs=prompt_logprobs,
        )
        request.priority = priority
        self.requests.append(request)
        self.reported[request.id] = []
        self.loop.submit(request)

    @rule(num_steps=st.integers(1, 4))
    def run_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for new in self.loop.step():
                self.reported[new.request.id].append(new)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.loop.cancel(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def time_is_up(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.deadline_s is None and request.finish_reason is None:
            request.deadline_s = 0.0
            self.loop._deadlines.push(0.0, request)

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "loop"):
            self.loop.check_integrity()
            check_caches(self.loop)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        while self.loop.has_work:
            self.run_steps(1)
        self.loop.check_integrity()
        stats = self.loop.stats()
        assert stats.num_running == stats.num_waiting == stats.num_cached_tokens == 0
        assert stats.num_finished == len(self.requests)
        check_forgotten(self.loop)
        for request in self.requests:
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        tokens = [token for new in self.reported[request.id] for token in new.token_ids]
        assert tokens == request.output_ids
        expected = self.expected(request)
        if request.finish_reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
            expected = expected[: request.num_output]
        assert request.output_ids == expected
        if request.params.prompt_logprobs and request.num_output:
            assert len(request.prompt_logprobs) == request.num_prompt - 1

    def expected(self, request: Request) -> list[int]:
        return alone(self.name, request)


class AdaptiveStorm(Storm):
    """Whatever sizes are chosen, the output is that of plain decoding."""

    @initialize(
        name=st.sampled_from(sorted(CERTAIN)),
        policy=st.sampled_from(sorted(POLICIES)),
        seed=st.integers(0, 99),
    )
    def start(self, name: str, policy: str, seed: int) -> None:
        self.lengths = AnyLength(seed)
        self.loop = storm_loop(CERTAIN[name](), replace(POLICIES[policy], lengths=self.lengths))
        self.requests, self.reported = [], {}

    def expected(self, request: Request) -> list[int]:
        return alone("none", request)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "loop"):
            assert not self.lengths.open


def check_forgotten(loop: SpeculativeLoop) -> None:
    """Nothing is left of any request."""
    assert not loop._slots._num_kept
    assert not loop._slots._first_own
    assert not loop._deadlines
    left: list[object] = [loop._drafter]
    while left:
        drafter = left.pop()
        left += [part for name in _PARTS if (part := getattr(drafter, name, None)) is not None]
        for name in _OF_REQUESTS:
            assert not getattr(drafter, name, None), f"{type(drafter).__name__}.{name}"


_PARTS = ("_lookup", "_fallback", "_drafter")
_OF_REQUESTS = ("_states", "_texts", "_indexes", "_last")  # of drafters, by a request's id


def check_caches(loop: SpeculativeLoop) -> None:
    """Every slot holds the tokens that count as computed, in the drafter's cache too."""
    target = loop._target
    assert isinstance(target, HashEngine)
    for request in loop._scheduler.running:
        row = target.cache[request.slot, : request.num_computed]
        assert row.tolist() == request.token_ids[: request.num_computed]
    model = getattr(loop._drafter, "_fallback", loop._drafter)
    if not isinstance(model, ModelDrafter):
        return
    assert isinstance(model._runner, HashEngine)
    for request in loop._scheduler.running:
        if state := model._states.get(request.id):
            row = model._runner.cache[request.slot, : state.num_computed]
            text = request.token_ids[model._shift :]
            assert row.tolist() == text[: state.num_computed]


Storm.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestStorm = Storm.TestCase
AdaptiveStorm.TestCase.settings = Storm.TestCase.settings
TestAdaptiveStorm = AdaptiveStorm.TestCase


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


def test_a_request_that_wants_all_logits_waits_for_no_other_to_compute_them() -> None:
    loop, _ = faulty_loop(NoDrafter(), 0)
    prompt = [i % 7 + 1 for i in range(100)]
    first, scored = make_request(prompt, 2), make_request([*prompt, 1], 2, prompt_logprobs=True)
    loop.submit(first)
    loop.step()
    loop.submit(scored)
    while not first.num_output:
        loop.step()
    assert scored.slot >= 0


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


@pytest.mark.parametrize("seed", range(3))
def test_a_soak_in_mixed_options_loses_and_doubles_nothing(seed: int) -> None:
    """Failing steps fail their own requests, and the loop goes on."""
    rng = random.Random(seed)
    make_drafter: Callable[[], Drafter] = DRAFTERS[rng.choice(sorted(DRAFTERS))]
    loop = storm_loop(make_drafter(), POLICIES["small prefix cache"])
    target = loop._target
    assert isinstance(target, HashEngine)
    finished: list[Request] = []
    open_requests: list[Request] = []
    for i in count():
        if i < 670 and len(open_requests) < 12:
            request = _random_request(rng)
            open_requests.append(request)
            loop.submit(request)
        if rng.random() < 0.02:
            target.fail_at = {len(target.steps) + 1}
        if open_requests and rng.random() < 0.02:
            cancelled = rng.choice(open_requests)
            loop.cancel(cancelled)
        loop.step()
        check_caches(loop)
        done = [r for r in open_requests if r.finish_reason is not None]
        finished += done
        open_requests = [r for r in open_requests if r.finish_reason is None]
        target.steps = target.steps[-1:] * len(target.steps)  # keep the number, not the arrays
        if i >= 670 and not loop.has_work:
            break
    loop.check_integrity()
    check_forgotten(loop)
    assert loop.stats().num_finished == len(finished) == len({r.id for r in finished})
    reasons = {request.finish_reason for request in finished}
    assert {FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.LENGTH} <= reasons
    failed = [r for r in finished if r.finish_reason is FinishReason.ERROR]
    assert all(r.error == "the fake engine was told to fail" for r in failed)


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
