"""Masks of the grammar engine, against languages that are listed in full."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specexport.errors import EngineError, RequestError
from specexport.runtime.grammar import GrammarConstraint, Grammars
from specexport.runtime.structure import (
    JSON_OBJECT,
    Choice,
    Grammar,
    JsonSchema,
    Regex,
    Structure,
)
from tests.tiny import EOS_ID, VOCAB_SIZE, write_tokenizer

TEXT = "the order of the customer: name, number, order, name and number of the order "


def write_merging_tokenizer(folder: Path) -> Path:
    """Byte-level, with tokens of several letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 20, '{"name": "order"}' * 9], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_fallback_tokenizer(folder: Path) -> Path:
    """As SentencePiece's: spaces are ▁, and bytes that are in no token have tokens of their own."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *'abcdefghijklmnopqrstuvwxyz"{}:,0123456789', "▁a", '":', "na", "▁na"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ('"', ":"), ("n", "a"), ("▁", "na")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def letters(folder: Path) -> Grammars:
    """One token a byte; ids from 258 on are padding of the model's vocabulary."""
    write_tokenizer(folder)
    return Grammars(folder / "tokenizer.json", VOCAB_SIZE, [EOS_ID])


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grammars, Tokenizer]:
    path = write_merging_tokenizer(tmp_path_factory.mktemp("merging"))
    tokenizer = Tokenizer.from_file(str(path))
    return Grammars(path, 400, [0]), tokenizer


def byte_ids(text: str) -> list[int]:
    """Tokens of the tokenizer with one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = "".join(piece for piece, _ in tokens.pre_tokenize_str(text))
    return [alphabet.index(letter) for letter in letters]


CHOICES = ("yes", "no", "nobody", 'a "b"\n\\', "日本", "😀", "\x7f\x00", "/x/ | $ <eos>")
# Structures of few texts, and all of these.
LISTED: list[tuple[Structure, Sequence[str]]] = [
    (
        Regex("(ab|abc|x)[01]{1,2}"),
        [w + d for w in ("ab", "abc", "x") for d in ("0", "1", "00", "01", "10", "11")],
    ),
    (Regex("^a?b?$"), ["", "a", "b", "ab"]),
    (
        Grammar('start: a "-" a\na: "x" | "yy" | "é"'),
        [f"{a}-{b}" for a in ("x", "yy", "é") for b in ("x", "yy", "é")],
    ),
    (Grammar('root ::= "(" ("p" | "q" "r"?) ")"'), ["(p)", "(q)", "(qr)"]),
    (
        JsonSchema({"enum": [1, True, None, "no", "nö"]}),
        ["1", "true", "null", '"no"', '"nö"'],
    ),
    (
        JsonSchema(
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 12]}},
                "required": ["a"],
                "additionalProperties": False,
            },
            one_line=True,
        ),
        [f'{{"a": {a}{b}}}' for a in ("true", "false") for b in ("", ', "b": 1', ', "b": 12')],
    ),
    (Choice(CHOICES), CHOICES),
]


@pytest.mark.parametrize(("structure", "texts"), LISTED, ids=lambda s: type(s).__name__)
def test_masks_of_single_bytes_are_what_the_language_says(
    structure: Structure, texts: Sequence[str], letters: Grammars
) -> None:
    """At every prefix: the bytes that go on with a text, and the end where a text ends."""
    spelled = [byte_ids(word) for word in texts]
    constraint = letters.constraint(structure)
    for prefix in {tuple(ids[:n]) for ids in spelled for n in range(len(ids) + 1)}:
        expected = {ids[len(prefix)] for ids in spelled if starts(ids, prefix)}
        can_end = list(prefix) in spelled
        assert constraint.is_complete(prefix) == (can_end and not expected)
        ends = {EOS_ID} if can_end else set()
        assert set(np.flatnonzero(constraint.allowed(prefix)).tolist()) == expected | ends
        if len(expected) == 1 and not can_end:
            assert constraint.forced(prefix, 1) == tuple(expected)
        else:
            assert constraint.forced(prefix, 9) == ()


def starts(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    return len(ids) > len(prefix) and list(ids[: len(prefix)]) == list(prefix)


@pytest.mark.parametrize(("structure", "texts"), LISTED, ids=lambda s: type(s).__name__)
def test_masks_of_longer_tokens_are_what_the_language_says(
    structure: Structure, texts: Sequence[str], merging: tuple[Grammars, Tokenizer]
) -> None:
    """Where one text alone can follow, the engine allows one token: the tokenizer's own."""
    grammars, tokenizer = merging
    encoded = [text.encode() for text in texts]
    spelled = [as_bytes(tokenizer, [i]) for i in range(tokenizer.get_vocab_size())]
    constraint = grammars.constraint(structure)
    todo: list[tuple[int, ...]] = [()]
    num_seen = 0
    while todo:
        path = todo.pop()
        num_seen += 1
        mask = constraint.allowed(path)
        allowed = set(np.flatnonzero(mask).tolist()) - {0}
        before = b"".join(spelled[i] for i in path)
        expected = {
            i
            for i in range(1, len(spelled))
            if any(text.startswith(before + spelled[i]) for text in encoded)
        }
        assert mask[0] == (before in encoded)
        assert allowed <= expected
        assert bool(allowed) == bool(expected)
        if allowed != expected:  # what comes next is settled
            assert len(allowed) == 1
            assert constraint.forced(path, 1) == tuple(allowed)
        todo += [(*path, token_id) for token_id in allowed]
    assert num_seen >= len(encoded)


def as_bytes(tokenizer: Tokenizer, path: Sequence[int]) -> bytes:
    """A token's letters stand for bytes; the alphabet is in the order of GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + i): byte for i, byte in enumerate(others)}
    letters = "".join(tokenizer.id_to_token(i) or "" for i in path)
    return bytes(table[letter] for letter in letters)


NESTED = JsonSchema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "order": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 3},
        },
        "required": ["name", "order"],
        "additionalProperties": False,
        "$defs": {
            "line": {
                "type": "object",
                "properties": {"number": {"type": "integer"}, "open": {"type": "boolean"}},
                "required": ["number"],
            }
        },
    }
)
WALKED = [NESTED, Regex("(the (order|name) ){1,4}of[a-z ]*"), Choice(("name", "number", "names"))]


@pytest.mark.parametrize("structure", WALKED, ids=lambda s: type(s).__name__)
@given(data=st.data())
@settings(max_examples=20)
def test_a_mask_depends_on_its_prefix_alone(
    structure: Structure, merging: tuple[Grammars, Tokenizer], data: st.DataObject
) -> None:
    """However the matcher came there: forth and back, over steps, past tokens that it refused."""
    grammars, _ = merging
    wandering = grammars.constraint(structure)
    committed: list[int] = []
    path: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        fresh = grammars.constraint(structure)
        fresh.commit([*committed, *path])
        expected = fresh.allowed(())
        assert np.array_equal(wandering.allowed(path), expected)
        assert wandering.is_complete(path) == fresh.is_complete(())
        assert wandering.forced(path, 4) == fresh.forced((), 4)
        move = data.draw(st.sampled_from(["on", "on", "on", "back", "astray", "commit"]))
        tokens = [int(i) for i in np.flatnonzero(expected) if i != 0]
        if move == "on" and tokens:
            path.append(data.draw(st.sampled_from(tokens)))
        elif move == "back":
            path = path[: data.draw(st.integers(0, len(path)))]
        elif move == "astray":
            wrong = data.draw(st.lists(st.integers(0, 399), max_size=4))
            assert wandering.num_allowed([*path, *wrong]) >= len(path)
        elif move == "commit":
            cut = data.draw(st.integers(0, len(path)))
            wandering.commit(path[:cut])
            committed, path = committed + path[:cut], path[cut:]


def test_num_allowed_counts_up_to_the_first_that_is_not(letters: Grammars) -> None:
    constraint = letters.constraint(Choice(("ab", "abc", "b")))
    a, b, c = byte_ids("abc")
    for path, expected in (
        ((), 0),
        ((a, b, c), 3),
        ((a, c), 1),
        ((c,), 0),
        ((a, b, EOS_ID), 3),
        ((a, EOS_ID, b), 1),
        ((EOS_ID,), 0),
        ((a, b, EOS_ID, c), 3),
        ((a, b, c, EOS_ID), 4),
        ((a, b, c, a), 3),
        ((b, 270), 1),
    ):
        assert constraint.num_allowed(path) == expected, path


def test_every_end_of_sequence_token_may_end_the_output(folder: Path) -> None:
    write_tokenizer(folder)
    grammars = Grammars(folder / "tokenizer.json", VOCAB_SIZE, [256, EOS_ID])
    constraint = grammars.constraint(Regex("a+"))
    (a,) = byte_ids("a")
    assert np.flatnonzero(constraint.allowed(())).tolist() == [a]
    assert np.flatnonzero(constraint.allowed((a,))).tolist() == [a, 256, EOS_ID]
    for end in (256, EOS_ID):
        assert constraint.is_complete((a, end))
    constraint.commit([a, 256])
    assert constraint.is_complete(())


def test_special_and_padding_tokens_are_no_text(letters: Grammars) -> None:
    mask = letters.constraint(Regex("(?s:.)*")).allowed(())
    assert mask[EOS_ID]
    assert not mask[256]
    assert not mask[258:].any()
    assert mask[:256].sum() == 128 + 0xF4 - 0xC2 + 1  # the bytes that begin a character


@pytest.mark.parametrize("text", ["a<eos>b", "<bos>", "<eos>", "x<bos><bos>"])
def test_a_text_that_reads_like_a_special_token_is_spelled_by_others(
    text: str, letters: Grammars
) -> None:
    """Forced text, too, where the engine asks the tokenizer how to write it."""
    constraint = letters.constraint(Choice((text,)))
    assert constraint.forced((), 99) == tuple(byte_ids(text))
    assert constraint.is_complete(byte_ids(text))


def test_a_path_that_is_not_allowed_is_an_error(letters: Grammars) -> None:
    constraint = letters.constraint(Choice(("yes", "no")))
    with pytest.raises(EngineError, match="the draft breaks the grammar"):
        constraint.allowed([5])
    with pytest.raises(EngineError, match="the output breaks the grammar"):
        constraint.commit([5])


def fallback_texts(text: str) -> Iterator[list[int]]:
    """Ways to write a text in the tokenizer with byte fallback: whole pieces, and bytes alone."""
    yield [2 + byte for byte in text.encode()]


@pytest.mark.parametrize("text", ["nana", "日本", "a 😀 b", '{"na": 1}', "é"])
def test_byte_fallback_spells_any_text(text: str, tmp_path: Path) -> None:
    """The tokenizer's own tokens of a text are allowed, and so is each byte where text is open."""
    path = write_fallback_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # no space before an output
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    grammars = Grammars(path, 320, [1])
    for structure in (Choice((text, "zz" + text)), Regex("[^☃]+")):
        constraint = grammars.constraint(structure)
        assert constraint.num_allowed(ids) == len(ids)
        assert constraint.allowed(ids)[1]
    for spelled in fallback_texts(text):
        constraint = grammars.constraint(Regex("[^☃]+"))
        assert constraint.num_allowed(spelled) == len(spelled)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Regex("a("), "The regular expression is refused: unclosed group."),
        (Regex("a(?=b)"), "look-around, including look-ahead and look-behind, is not supported."),
        (Regex(r"(a)\1"), "backreferences are not supported."),
        (Regex("a{0}"), "The regular expression is refused: it describes the empty text alone."),
        (JsonSchema({"type": "nope"}), "The JSON schema is refused: Invalid type: nope."),
        (JsonSchema({"not": {}}), r'Unimplemented keys: \["not"\].'),
        (JsonSchema({"type": "array", "uniqueItems": True}), r"Unimplemented keys: \[\"uniqueI"),
        (JsonSchema({"oneOf": [{"minimum": 1}, {"maximum": 5}]}), "oneOf constraints are not sup"),
        (JsonSchema({"enum": []}), "Unsatisfiable schema: anyOf is empty."),
        (JsonSchema({"$ref": "#/nope"}), "Pointer '/nope' does not exist."),
        (JsonSchema({"$ref": "#"}), "no text is described by it."),
        (JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}), "greater than maximum"),
        (Grammar("start: foo"), 'The grammar is refused: at 1\\(8\\): unknown name: "foo".'),
        (Grammar('x: "a"'), "no start rule found."),
        (Grammar('root ::= "a" b)('), "Expected name at line 1"),
        (Grammar('start: "a" x\nx[max_tokens=3]: /[a-z]*/'), "rollback not supported with max_tok"),
        (Grammar("start: <eos>"), 'unknown special token: "<eos>".'),
    ],
    ids=str,
)
def test_a_structure_that_cannot_be_followed_is_refused_with_the_reason(
    structure: Structure, message: str, letters: Grammars
) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        letters.constraint(structure)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JsonSchema("{"), "The JSON schema is no JSON: Expecting property name"),
        (lambda: JsonSchema("[]"), r"The JSON schema is '\[\]'; it must be an object"),
        (lambda: JsonSchema({"a": object()}), "The JSON schema is no JSON: Object of type object"),
        (lambda: Regex(""), "The regular expression is ''; it must be a text that is not empty"),
        (lambda: Grammar(None), "The grammar is None"),  # type: ignore[arg-type]
        (lambda: Choice(()), "give at least one text"),
        (lambda: Choice("yes"), "The choices are 'yes'; give at least one text"),
        (lambda: Choice(("a", "")), "A choice is ''"),
    ],
)
def test_a_structure_that_is_none_is_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_a_schema_may_be_a_dictionary_or_its_text(letters: Grammars) -> None:
    schema = {"type": "object", "properties": {"ä": {"const": 1}}, "required": ["ä"]}
    first, second = (
        letters.constraint(JsonSchema(given)).allowed(byte_ids('{"'))
        for given in (schema, json.dumps(schema))
    )
    assert np.array_equal(first, second)


def test_one_of_is_any_of_where_the_schema_says_so(letters: Grammars) -> None:
    schema = {
        "oneOf": [{"const": 12}, {"const": "b"}],
        "x-guidance": {"coerce_one_of": True},
    }
    for one_line in (False, True):
        constraint = letters.constraint(JsonSchema(schema, one_line=one_line))
        assert constraint.num_allowed(byte_ids("12")) == 2
        assert constraint.num_allowed(byte_ids('"b"')) == 3


def test_any_json_object_is_a_structure(letters: Grammars) -> None:
    constraint = letters.constraint(JSON_OBJECT)
    for text in ("{}", '{"a": [1, {"b": null}], "ü": "\\n😀"}', '{ \n\t"x":-1.5e+3 }'):
        ids = byte_ids(text)
        assert constraint.num_allowed(ids) == len(ids)
        assert constraint.is_complete(ids)
    assert constraint.num_allowed(byte_ids("[1]")) == 0


def test_without_the_package_the_error_says_what_to_install(
    letters: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'specexport\[structured\]'"):
        letters.constraint(Regex("a"))


def test_outputs_of_one_structure_are_followed_apart(letters: Grammars) -> None:
    first, second = (letters.constraint(Choice(("ab", "cd"))) for _ in range(2))
    a, c = byte_ids("ac")
    first.commit([a])
    second.commit([c])
    assert first.forced((), 5) == tuple(byte_ids("b"))
    assert second.forced((), 5) == tuple(byte_ids("d"))
    assert isinstance(first, GrammarConstraint)
