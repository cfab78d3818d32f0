"""Suffix lookup: the automaton, the store of finished outputs and the drafter over both.

The reference is the definition: every suffix compared with every place, the longest first.
"""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specexport.runtime.drafters.base import DraftRequest
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request
from specexport.runtime.suffix_automaton import SuffixAutomaton
from specexport.runtime.suffix_store import END, SuffixStore

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def by_definition(context: list[int], text: list[int], last_end: int) -> tuple[int, list[int]]:
    """Longest suffix of `context` in `text[:last_end]`: its length, and where its places end."""
    for n in range(min(len(context), last_end), 0, -1):
        ends = [e for e in range(n, last_end + 1) if text[e - n : e] == context[-n:]]
        if ends:
            return n, ends
    return 0, []


def automaton(tokens: Sequence[int]) -> SuffixAutomaton:
    made = SuffixAutomaton()
    made.extend(tokens)
    return made


def request(tokens: list[int], request_id: int = 0, num_prompt: int | None = None) -> Request:
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    return Request(request_id, SamplingParams(), 100, num_prompt, list(tokens))


def draft(drafter: SuffixDrafter, item: Request, k: int) -> list[int]:
    proposed = drafter.propose([DraftRequest(item, k)])[0]
    assert all(p.is_one_hot for p in proposed.probs)
    assert len(proposed.probs) == len(proposed.token_ids)
    return list(proposed.token_ids)


def propose(tokens: list[int], k: int = 8, min_match: int = 1, factor: int = 100) -> list[int]:
    return draft(SuffixDrafter(min_match, factor), request(tokens), k)


@given(texts)
def test_the_longest_earlier_suffix_is_found(text: list[int]) -> None:
    match = automaton(text).match_own()
    length, ends = by_definition(text, text, len(text) - 1)
    assert match.length == length
    assert not ends or match.start in ends


@given(st.lists(st.integers(0, 3), min_size=1, max_size=17))
def test_of_its_occurrences_the_latest_is_found(text: list[int]) -> None:
    """Longer texts may pass a loop, of whose places not all are known."""
    match = automaton(text).match_own()
    _, ends = by_definition(text, text, len(text) - 1)
    assert match.start == max(ends, default=0)


def test_a_later_occurrence_replaces_an_earlier_one_in_long_texts() -> None:
    text = [t for i in range(100, 400) for t in (1, 2, i)] + [1, 2]
    match = automaton(text).match_own()
    assert (match.length, match.start) == (2, len(text) - 3)


@given(texts, st.lists(st.integers(0, 4), max_size=20))
def test_the_longest_suffix_of_another_text_is_found(text: list[int], context: list[int]) -> None:
    match = automaton(text).match(context)
    length, ends = by_definition(context, text, len(text))
    assert match.length == length
    assert not ends or match.start in ends


@given(texts, st.data())
def test_a_text_may_be_searched_while_it_grows(text: list[int], data: st.DataObject) -> None:
    """Pieces of any size, searched in between, end in what one piece gives."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    grown = SuffixAutomaton()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        grown.extend(text[start:end])
        grown.match(text[:end])
        if end:
            assert grown.match_own().length == by_definition(text[:end], text[:end], end - 1)[0]
    assert grown.token_ids == text
    assert grown.match_own() == automaton(text).match_own()


@pytest.mark.parametrize(
    "text", [[7] * 3000, list(range(7)) * 400, list(range(3000)), [0, 1, 1, 0, 1, 0, 0, 1] * 300]
)
def test_the_automaton_grows_with_the_text_alone(text: list[int]) -> None:
    """Blumer et al.: at most 2n - 1 states and 3n - 4 transitions."""
    made = automaton(text)
    assert len(made._next) < 2 * len(text)
    assert sum(map(len, made._next)) <= 3 * len(text) - 4


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2, 4]),  # the longer match beats the later one
        ([2, 3, 9, 2, 4, 8, 2], [4, 8, 2, 4]),  # of equally long matches the latest
        ([7, 7], [7, 7, 7, 7]),  # a copy that reaches the end goes on with itself
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([0, 0], [0, 0, 0, 0]),
        ([0, 5, 0], [5, 0, 5, 0]),
        ([5, 0, 9, 5], [0, 9, 5, 0]),
        ([1, 2, 3, 4], []),
        ([1, 2], []),
        ([5], []),
        ([0], []),
    ],
)
def test_the_longest_match_is_continued(tokens: list[int], expected: list[int]) -> None:
    assert propose(tokens, k=4) == expected


@given(texts, st.integers(0, 12), st.integers(1, 4), st.integers(1, 3))
def test_drafts_are_continuations_within_the_limits(
    text: list[int], k: int, min_match: int, factor: int
) -> None:
    found = propose(text, k, min_match, factor)
    length, ends = by_definition(text, text, len(text) - 1)
    if length < min_match:
        assert found == []
        return
    assert len(found) == min(k, factor * length)
    longer = text + found
    assert any(found == longer[end : end + len(found)] for end in ends)


@given(texts, st.integers(1, 60), st.integers(1, 8))
def test_growing_a_text_gives_the_draft_of_searching_it_anew(
    text: list[int], cut: int, k: int
) -> None:
    drafter, grown = SuffixDrafter(1, 2), request(text[:cut])
    draft(drafter, grown, 0)
    grown.token_ids.extend(text[cut:])
    assert draft(drafter, grown, k) == propose(text, k, factor=2)


def test_requests_do_not_share_their_texts() -> None:
    drafter = SuffixDrafter(1, 2, store_tokens=100)
    a, b = request([1, 2, 3, 1], 0), request([3, 3, 1], 1)
    drafts = drafter.propose([DraftRequest(a, 2), DraftRequest(b, 2)])
    assert [d.token_ids for d in drafts] == [(2, 3), ()]


def test_a_released_request_leaves_nothing_behind_without_a_store() -> None:
    drafter = SuffixDrafter(1, 2)
    first, never_proposed = request([1, 2, 1], 0, num_prompt=1), request([1, 2], 1)
    draft(drafter, first, 2)
    drafter.release(first)
    drafter.release(never_proposed)
    assert not drafter._texts
    assert len(drafter._store) == 0


def finished(drafter: SuffixDrafter, output: list[int], request_id: int) -> None:
    drafter.release(request([9, *output], request_id, num_prompt=1))


def test_an_earlier_output_is_continued_where_its_match_is_longer() -> None:
    drafter = SuffixDrafter(1, 100, store_tokens=100)
    finished(drafter, [1, 2, 3, 4, 5, 6], 0)
    assert draft(drafter, request([2, 3], 1), 8) == [4, 5, 6]  # to its end and no further
    assert draft(drafter, request([3, 8, 2, 3], 2), 2) == [4, 5]
    assert draft(drafter, request([2, 3, 8, 2, 3], 3), 2) == [8, 2]  # equally long: its own
    assert draft(drafter, request([5, 6], 4), 8) == []  # where the output ended
    assert draft(drafter, request([9], 5), 8) == []  # prompts are not kept


def test_no_match_spans_two_outputs() -> None:
    drafter = SuffixDrafter(2, 100, store_tokens=100)
    finished(drafter, [1, 2], 0)
    finished(drafter, [3, 4], 1)
    assert draft(drafter, request([2, 3], 2), 8) == []
    assert draft(drafter, request([1, 2], 3), 8) == []


@given(
    outputs=st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=20),
    max_tokens=st.integers(0, 60),
)
@example(outputs=[[1, 2, 3]], max_tokens=3)
def test_the_store_keeps_its_budget_and_what_came_last(
    outputs: list[list[int]], max_tokens: int
) -> None:
    store = SuffixStore(max_tokens)
    for output in outputs:
        store.add(output)
        assert len(store) <= max_tokens
        kept = min(len(output), max(max_tokens // 2 - 1, 0))
        assert store.match(output).length >= kept


def test_the_store_forgets_the_oldest() -> None:
    store = SuffixStore(20)  # two halves of three outputs of two tokens and an end
    for i in range(10):
        store.add([2 * i, 2 * i + 1])
    held = [i for i in range(10) if store.match([2 * i, 2 * i + 1]).length == 2]
    assert held == [6, 7, 8, 9]


def test_what_follows_in_the_store_ends_with_the_output() -> None:
    store = SuffixStore(20)
    store.add([0, 1])
    store.add([2, 3])
    assert store.match([0]).continuation(3) == [1, END, 2]
    assert store.match([5]).length == 0
