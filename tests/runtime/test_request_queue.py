"""Requests in an order, of which some end before their turn."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.request import Request
from specexport.runtime.request_queue import RequestQueue
from tests.loop_tools import make_request


@given(
    keys=st.lists(st.integers(0, 5), max_size=60),
    removed=st.lists(st.integers(0, 59), max_size=60),
)
@settings(max_examples=100)
def test_what_is_left_comes_by_key_and_of_equal_keys_the_older_one_first(
    keys: list[int], removed: list[int]
) -> None:
    queue = RequestQueue()
    left: list[tuple[float, Request]] = [(key, make_request([1], 1)) for key in keys]
    requests = [request for _, request in left]
    for key, request in left:
        queue.push(key, request)
    for number in removed:
        if number < len(requests):
            queue.remove(requests[number])
            left = [pair for pair in left if pair[1] is not requests[number]]
        assert len(queue) == len(list(queue)) == len(left)
    for pair in sorted(left, key=lambda pair: (pair[0], pair[1].id)):
        assert queue.first() == pair
        queue.remove(pair[1])
    assert queue.first() is None


def test_the_first_one_may_come_back() -> None:
    queue = RequestQueue()
    first, second = make_request([1], 1), make_request([1], 1)
    queue.push(0.0, first)
    queue.push(0.0, second)
    queue.remove(first)
    queue.push(0.0, first)
    assert queue.first() == (0.0, first)
    assert len(queue) == 2


def test_what_was_removed_is_not_held_on_to() -> None:
    queue = RequestQueue()
    last = make_request([1], 1)
    queue.push(1.0, last)
    for _ in range(1000):
        request = make_request([1], 1)
        queue.push(2.0, request)
        queue.remove(request)
    assert len(queue._heap) < 50
    assert queue.first() == (1.0, last)
