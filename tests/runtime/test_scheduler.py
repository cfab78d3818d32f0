"""Who runs, and how much of each text a step computes."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.request import Request
from specexport.runtime.scheduler import PATIENCE_S, Scheduler
from specexport.runtime.turn import Turn, share_calls
from tests.loop_tools import make_request


class FakeSlots:
    """Remembers what is moved; knows no prefixes."""

    def __init__(self) -> None:
        self.moves: list[tuple[int, int]] = []
        self.kept: list[Request] = []

    def fill(self, request: Request) -> None:
        pass

    def is_under_way(self, request: Request, running: Sequence[Request]) -> bool:
        return False

    def move(self, request: Request, destination: int) -> None:
        self.moves.append((request.slot, destination))

    def keep(self, request: Request) -> None:
        self.kept.append(request)


def request_at(
    time_s: float, num_prompt: int = 1, priority: int = 0, max_tokens: int = 5
) -> Request:
    request = make_request([1] * num_prompt, max_tokens)
    request.priority = priority
    request.stats.submitted_s = time_s
    return request


def scheduler(max_slots: int = 2, step_tokens: int = 64) -> Scheduler:
    return Scheduler(max_slots, step_tokens, FakeSlots())


def advance(turns: Sequence[Turn]) -> None:
    """What the loop would do, without an engine."""
    for turn in turns:
        request = turn.request
        is_whole = turn.is_whole
        request.num_computed += turn.num_tokens
        if is_whole:
            request.token_ids.append(1)


def finish_all(queue: Scheduler, limit: int = 10_000) -> list[Request]:
    """Run until nothing is left; the requests in the order in which they finished."""
    finished: list[Request] = []
    for _ in range(limit):
        turns = queue.next()
        if not turns:
            return finished
        queue.check_integrity()
        advance(turns)
        for request in [r for r in queue.running if r.num_left <= 0]:
            queue.remove(request)
            finished.append(request)
    pytest.fail("requests starve")


def test_equal_priorities_go_first_come_first_served() -> None:
    queue = scheduler(max_slots=1)
    requests = [request_at(i) for i in range(5)]
    for request in reversed(requests):
        queue.add(request)
    assert finish_all(queue) == requests
    assert queue.num_preemptions == 0


def test_a_higher_priority_takes_the_slot_of_the_last_in_line_which_goes_on_later() -> None:
    queue = scheduler()
    first, second, urgent = request_at(0), request_at(1), request_at(2, priority=1)
    queue.add(first)
    queue.add(second)
    advance(queue.next())
    queue.add(urgent)
    turns = queue.next()
    assert [turn.request for turn in turns] == [first, urgent]
    assert (second.slot, second.num_computed, second.num_computed_before) == (-1, 0, 1)
    advance(turns)
    assert set(finish_all(queue)) == {first, second, urgent}
    assert queue.num_preemptions == 1


def test_what_a_request_had_computed_is_computed_again_before_it_goes_on() -> None:
    queue = scheduler(max_slots=1)
    request, urgent = request_at(0, num_prompt=5), request_at(1, priority=1)
    queue.add(request)
    advance(queue.next())
    advance(queue.next())
    assert (request.num_computed, len(request.token_ids)) == (6, 7)
    queue.add(urgent)
    while urgent.num_left > 0:
        advance(queue.next())
    queue.remove(urgent)
    assert request.num_computed == 0
    advance(queue.next())
    assert (request.num_computed, len(request.token_ids)) == (6, 7)  # nothing was drawn
    (turn,) = queue.next()
    assert turn.is_whole
    assert turn.num_tokens == 1


def test_no_priority_is_passed_for_longer_than_its_patience() -> None:
    """Urgent requests arrive for ever; the one that waits is passed by those of 10 seconds."""
    queue = scheduler(max_slots=1)
    patient = request_at(0, max_tokens=1)
    queue.add(patient)
    num_passed = 0
    for time_s in range(1000):
        queue.add(request_at(time_s, priority=1, max_tokens=1))
        (turn,) = queue.next()
        advance([turn])
        queue.remove(turn.request)
        if turn.request is patient:
            break
        num_passed += 1
    assert num_passed == PATIENCE_S


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    max_slots=st.integers(1, 5),
    step_tokens=st.integers(1, 64),
    num_drafted=st.integers(0, 20),
)
@settings(max_examples=100)
def test_a_step_keeps_to_its_budget_and_everybody_gets_on(
    sizes: list[int], max_slots: int, step_tokens: int, num_drafted: int
) -> None:
    queue = scheduler(max_slots, step_tokens)
    for i, size in enumerate(sizes):
        queue.add(request_at(i, num_prompt=size))
    least = min(step_tokens, 16)
    while turns := queue.next(num_drafted):
        queue.check_integrity()
        decoding = [turn for turn in turns if not turn.request.is_catching_up]
        assert all(turn.is_whole for turn in decoding)
        spent = num_drafted + sum(turn.num_tokens for turn in decoding)
        prompts = sum(turn.num_tokens for turn in turns) - (spent - num_drafted)
        assert prompts <= max(step_tokens - spent, least)
        advance(turns)
        for request in [r for r in queue.running if r.num_left <= 0]:
            queue.remove(request)
    assert queue.num_waiting == 0


def test_a_prompt_goes_on_even_where_decoding_takes_the_whole_step() -> None:
    queue = scheduler(max_slots=5, step_tokens=4)
    for i in range(4):
        queue.add(request_at(i, max_tokens=100))
        advance(queue.next())
    queue.add(request_at(9, num_prompt=50))
    turns = queue.next()
    assert [turn.num_tokens for turn in turns] == [1, 1, 1, 1, 4]


def test_a_slot_is_given_out_when_the_first_tokens_can_be_computed() -> None:
    queue = scheduler(max_slots=4, step_tokens=10)
    for i in range(3):
        queue.add(request_at(i, num_prompt=25))
    assert [turn.num_tokens for turn in queue.next()] == [10]
    assert queue.num_waiting == 2


def test_an_urgent_request_does_not_wait_for_a_long_prompt_that_runs() -> None:
    queue = scheduler(max_slots=3, step_tokens=10)
    queue.add(request_at(0, num_prompt=1000))
    queue.add(request_at(1, num_prompt=1000))
    advance(queue.next())
    urgent = request_at(2, num_prompt=8, priority=1)
    queue.add(urgent)
    assert [(turn.request is urgent, turn.num_tokens) for turn in queue.next()] == [
        (False, 2),
        (True, 8),
    ]
    assert queue.num_waiting == 1


def test_nobody_waits_for_what_one_who_comes_later_is_about_to_compute() -> None:
    class Alike(FakeSlots):
        def is_under_way(self, request: Request, running: Sequence[Request]) -> bool:
            return bool(running)

    queue = Scheduler(3, 10, Alike())
    queue.add(request_at(0, num_prompt=1000))
    advance(queue.next())
    urgent, patient = request_at(2, num_prompt=8, priority=1), request_at(3)
    queue.add(urgent)
    queue.add(patient)
    queue.next()
    assert urgent.slot >= 0
    assert patient.slot < 0


def test_removing_a_request_moves_the_last_row_into_its_slot() -> None:
    slots = FakeSlots()
    queue = Scheduler(3, 64, slots)
    requests = [request_at(i) for i in range(3)]
    for request in requests:
        queue.add(request)
    queue.next()
    queue.remove(requests[0])
    assert slots.moves == [(2, 0)]
    assert queue.running == [requests[2], requests[1]]
    queue.check_integrity()


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([], []),
        ([3], [[0]]),
        ([1, 1, 1], [[0, 1, 2]]),
        ([1, 7, 1], [[0, 1, 2]]),  # padding costs less than a call
        ([1, 200, 1], [[0, 2], [1]]),
        ([200, 200, 200], [[0, 1, 2]]),
        ([1, 256, 7, 90], [[0, 2], [3], [1]]),
    ],
)
def test_long_parts_of_prompts_run_alone(widths: list[int], expected: list[list[int]]) -> None:
    assert share_calls(widths) == expected


@given(widths=st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_calls_hold_each_row_once_and_never_cost_more_than_one_call(widths: list[int]) -> None:
    calls = share_calls(widths)
    assert sorted(i for call in calls for i in call) == list(range(len(widths)))
    cost = sum(20 + len(call) * max(widths[i] for i in call) for call in calls)
    assert cost <= 20 + len(widths) * max(widths)
