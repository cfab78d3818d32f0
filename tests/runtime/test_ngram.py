"""N-gram lookup."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.runtime.drafters.base import DraftRequest
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request


def request(tokens: list[int], request_id: int = 0) -> Request:
    return Request(request_id, SamplingParams(), 100, len(tokens), tokens)


def propose(tokens: list[int], k: int = 4, ngrams: tuple[int, int] = (1, 3)) -> list[int]:
    draft = NgramDrafter(*ngrams).propose([DraftRequest(request(tokens), k)])[0]
    assert all(p.is_one_hot for p in draft.probs)
    return list(draft.token_ids)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2, 4]),  # the longer match beats the later one
        ([2, 3, 9, 2, 4, 8, 2], [4, 8, 2, 4]),  # of equally long matches the latest
        ([7, 7], [7, 7, 7, 7]),  # a copy that reaches the end goes on with itself
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 4], []),
        ([5], []),
    ],
)
def test_the_longest_and_latest_match_is_continued(tokens: list[int], expected: list[int]) -> None:
    assert propose(tokens) == expected


def test_shorter_ngrams_than_the_least_are_not_looked_up() -> None:
    assert propose([2, 3, 9, 2], ngrams=(2, 3)) == []
    assert propose([1, 2, 3, 9, 1, 2], ngrams=(2, 3)) == [3, 9, 1, 2]


def _by_definition(tokens: list[int], k: int, shortest: int, longest: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    k=st.integers(1, 8),
    shortest=st.integers(1, 3),
    more=st.integers(0, 2),
    cut=st.integers(1, 40),
)
def test_growing_a_text_gives_the_same_as_searching_it_anew(
    tokens: list[int], k: int, shortest: int, more: int, cut: int
) -> None:
    drafter = NgramDrafter(shortest, shortest + more)
    item = DraftRequest(request(tokens[:cut]), k)
    drafter.propose([item])
    item.request.token_ids.extend(tokens[cut:])
    found = drafter.propose([item])[0]
    assert list(found.token_ids) == _by_definition(tokens, k, shortest, shortest + more)


def test_requests_do_not_share_their_texts() -> None:
    drafter = NgramDrafter(1, 3)
    a, b = request([1, 2, 3, 1], 0), request([3, 3, 1], 1)
    drafts = drafter.propose([DraftRequest(a, 2), DraftRequest(b, 2)])
    assert [d.token_ids for d in drafts] == [(2, 3), ()]


def test_a_released_request_leaves_nothing_behind() -> None:
    drafter = NgramDrafter(1, 3)
    first = request([1, 2, 1])
    drafter.propose([DraftRequest(first, 2)])
    drafter.release(first)
    assert not drafter._indexes
