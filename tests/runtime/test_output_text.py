"""Stop texts: wherever token boundaries lie, the text ends where the definition says."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from specexport.runtime.output_text import OutputText
from specexport.runtime.tokenizer import TextStream, Tokenizer
from tests.tiny import write_tokenizer

PIECES = ["a", "b", "ab", "ba", "aab", "bba", "abab", "c"]


@pytest.fixture(scope="module")
def pieces() -> RawTokenizer:
    """Token i stands for PIECES[i]."""
    raw = RawTokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, "c"))
    raw.decoder = decoders.Fuse()
    return raw


def defined(text: str, stop: list[str], *, include_stop: bool) -> str:
    """Read character by character, the output ends as soon as it ends with a stop text."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[:end] if include_stop else text[: end - max(map(len, found))]
    return text


@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include_stop=st.booleans(),
)
@settings(max_examples=500)
def test_the_text_ends_at_the_first_stop_text_across_token_boundaries(
    pieces: RawTokenizer, token_ids: list[int], stop: list[str], include_stop: bool
) -> None:
    output = OutputText(TextStream(pieces), stop, include_stop=include_stop)
    shown = ""
    for num_pushed, token_id in enumerate(token_ids, start=1):
        found = output.push(token_id)
        shown += output.take()
        whole = "".join(PIECES[t] for t in token_ids[:num_pushed])
        # It stops with the very token that completes a stop text, and shows no part of one.
        assert (found is not None) == any(s in whole for s in stop)
        assert defined(whole, stop, include_stop=include_stop).startswith(shown)
        if found is not None:
            assert found in stop
            break
    shown += output.finish()
    whole = "".join(PIECES[t] for t in token_ids)
    assert shown == defined(whole, stop, include_stop=include_stop)


def test_what_may_begin_a_stop_text_is_held_back_and_no_more(pieces: RawTokenizer) -> None:
    output = OutputText(TextStream(pieces), ["abc"])
    shown = []
    for piece in ("b", "a", "b", "a", "c", "ab"):
        output.push(PIECES.index(piece))
        shown.append(output.take())
    assert shown == ["b", "", "", "ab", "ac", ""]
    assert output.finish() == "ab"


def test_a_stop_text_does_not_count_before_min_tokens(pieces: RawTokenizer) -> None:
    """Complete at token 2 it is passed over, though still in sight; at token 4 it ends the text."""
    output = OutputText(TextStream(pieces), ["ab", "abab"], min_tokens=3)
    found = [output.push(PIECES.index(piece)) for piece in ("a", "b", "c", "ab")]
    assert found == [None, None, None, "ab"]
    assert output.finish() == "abc"
    output = OutputText(TextStream(pieces), ["ab", "abbb"], min_tokens=3)
    found = [output.push(PIECES.index(piece)) for piece in ("a", "b", "b", "b")]
    assert found == [None, None, None, "abbb"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def test_a_stop_text_of_several_bytes_a_character_is_found(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer.stream(), ["🙂é"])
    ids = tokenizer.encode("naïve 🙂🙂é never")
    place = next(i for i, token_id in enumerate(ids) if output.push(token_id))
    assert tokenizer.decode(ids[: place + 1]) == "naïve 🙂🙂é"
    assert output.finish() == "naïve 🙂"


def test_a_token_that_ends_inside_a_character_may_complete_a_stop_text(tmp_path: Path) -> None:
    """Byte-level vocabularies hold tokens such as a space with the first byte of an emoji."""
    write_tokenizer(tmp_path)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    first_byte = Tokenizer(tmp_path).encode("🙂")[0]
    symbols = {i: s for s, i in raw.get_vocab().items()}
    merged = symbols[Tokenizer(tmp_path).encode("E")[0]] + symbols[first_byte]
    vocab = {**raw.get_vocab(with_added_tokens=False), merged: 400}
    joined = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    joined.decoder = decoders.ByteLevel()
    output = OutputText(TextStream(joined), ["THE"])
    ids = [*Tokenizer(tmp_path).encode("x TH"), 400]
    assert [output.push(token_id) for token_id in ids] == [None] * 4 + ["THE"]
    assert output.finish() == "x "


def test_a_character_cut_off_at_the_end_shows_as_one(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer.stream(), ["zz"])
    for token_id in tokenizer.encode("az🙂")[:-1]:
        assert output.push(token_id) is None
    assert output.take() == "a"
    assert output.finish().startswith("z�")
