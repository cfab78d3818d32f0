"""Random arrivals, cancellations, deadlines, preemptions, draft sizes: nothing leaks or changes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specexport.runtime.commit import NewTokens
from specexport.runtime.drafters.base import Drafter
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.lengths import ANY_WIDTH, DraftSize, FixedLength, RowState
from specexport.runtime.picking import raced
from specexport.runtime.request import FinishReason, Request
from tests.hash_engine import VOCAB_SIZE
from tests.loop_tools import DRAFTERS, draft_model, head, make_request
from tests.storm_tools import POLICIES, alone, check_caches, check_forgotten, storm_loop

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


Storm.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestStorm = Storm.TestCase
AdaptiveStorm.TestCase.settings = Storm.TestCase.settings
TestAdaptiveStorm = AdaptiveStorm.TestCase
