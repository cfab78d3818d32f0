"""The prefix cache against the plain definition: the longest text in common with a known one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.prefix_cache import BLOCK_TOKENS, Entries, PrefixCache, num_shared

PLENTY = 2**20
TOKEN_BYTES = 4


def put(cache: PrefixCache, text: list[int]) -> list[tuple[int, int]]:
    """Keep a text whose entries are its own tokens; what was read."""
    reads = []

    def read(start: int, stop: int) -> Entries:
        reads.append((start, stop))
        return Entries(np.array(text[start:stop], dtype=np.float32)[None, None, None, :, None])

    cache.put(text, read)
    cache.check_integrity()
    return reads


def longest(cache: PrefixCache, text: list[int]) -> list[int]:
    """The tokens that the entries found stand for."""
    found: list[Any] = []
    for piece in cache.longest(text):
        assert piece.start == len(found)
        found += piece.entries.target[0, 0, 0, : piece.stop - piece.start, 0].tolist()
    cache.check_integrity()
    return found


# Few tokens and common beginnings, so that texts share much.
texts = st.builds(
    lambda length, tail: [i % 5 for i in range(length)] + tail,
    st.integers(0, 3 * BLOCK_TOKENS),
    st.lists(st.integers(0, 2), min_size=1, max_size=BLOCK_TOKENS + 5),
)


@given(known=st.lists(texts, max_size=8), text=texts)
@settings(max_examples=200)
def test_the_longest_prefix_in_common_with_any_known_text_is_found(
    known: list[list[int]], text: list[int]
) -> None:
    cache = PrefixCache(PLENTY)
    for other in known:
        put(cache, other)
    length = max((num_shared(other, text) for other in known), default=0)
    assert longest(cache, text) == text[:length]


@given(known=st.lists(texts, min_size=1, max_size=12), budget=st.integers(0, 200))
@settings(max_examples=100)
def test_the_byte_budget_holds_and_what_is_found_is_right(
    known: list[list[int]], budget: int
) -> None:
    cache = PrefixCache(budget * TOKEN_BYTES)
    for text in known:
        put(cache, text)
        assert cache.size_bytes <= budget * TOKEN_BYTES
        found = longest(cache, text)
        assert found == text[: len(found)]


def test_the_least_recently_used_go_first() -> None:
    cache = PrefixCache(2 * BLOCK_TOKENS * TOKEN_BYTES)
    first, second, third = ([i] * BLOCK_TOKENS for i in range(3))
    put(cache, first)
    put(cache, second)
    assert longest(cache, first) == first
    put(cache, third)
    assert longest(cache, second) == []
    assert longest(cache, first) == first
    assert longest(cache, third) == third


def test_texts_share_the_blocks_that_they_have_in_common() -> None:
    cache = PrefixCache(PLENTY)
    common = [7] * (2 * BLOCK_TOKENS)
    put(cache, [*common, 1, 2])
    assert put(cache, [*common, 3, 4]) == [(2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 2)]
    assert cache.size_bytes == (len(common) + 4) * TOKEN_BYTES


def test_a_block_replaces_the_beginning_of_itself_and_covers_it() -> None:
    cache = PrefixCache(PLENTY)
    put(cache, [1, 2, 3])
    assert put(cache, [1, 2, 3, 4]) == [(0, 4)]
    assert cache.size_bytes == 4 * TOKEN_BYTES
    assert put(cache, [1, 2]) == []


@given(known=st.lists(texts, max_size=8), text=texts, start=st.integers(0, 3))
@settings(max_examples=100)
def test_what_is_forgotten_is_found_no_more_and_the_rest_still_is(
    known: list[list[int]], text: list[int], start: int
) -> None:
    cache = PrefixCache(PLENTY)
    for other in (*known, text):
        put(cache, other)
    cache.forget(text, start * BLOCK_TOKENS)
    length = max((num_shared(other, text) for other in known), default=0)
    least = min(start * BLOCK_TOKENS, len(text))
    found = longest(cache, text)
    assert text[:least] == found[:least]
    assert len(found) <= max(length, least)
    for other in known:
        if num_shared(other, text) < least:
            assert longest(cache, other) == other


def test_a_text_whose_entries_cannot_be_read_is_kept_up_to_there() -> None:
    cache, text = PrefixCache(PLENTY), [1] * (4 * BLOCK_TOKENS)

    def read(start: int, stop: int) -> Entries:
        if start >= 2 * BLOCK_TOKENS:
            raise MemoryError
        return Entries(np.zeros((1, 1, 1, stop - start, 1), dtype=np.float32))

    with pytest.raises(MemoryError):
        cache.put(text, read)
    cache.check_integrity()
    assert len(longest(cache, text)) == 2 * BLOCK_TOKENS


def test_a_text_may_be_longer_than_the_stack_is_deep() -> None:
    cache, text = PrefixCache(PLENTY), [1] * (1100 * BLOCK_TOKENS)
    put(cache, text)
    cache.forget(text, 0)
    assert cache.size_bytes == 0


def test_a_block_larger_than_the_budget_is_not_kept() -> None:
    cache = PrefixCache(10 * TOKEN_BYTES)
    put(cache, [1, 2, 3])
    put(cache, [5] * BLOCK_TOKENS)
    assert cache.size_bytes == 0


def test_nothing_in_common_is_nothing_found() -> None:
    cache = PrefixCache(PLENTY)
    assert longest(cache, [1]) == []
    put(cache, [1, 2])
    assert longest(cache, [2, 1]) == []
