"""Tokenizers rebuilt from GGUF metadata, against transformers' of the same vocabulary."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import Qwen2Tokenizer

from specexport.errors import CheckpointError
from specexport.export.checkpoint import open_checkpoint
from specexport.export.gguf_tokenizer import write_tokenizer

TEXTS = [
    "Hello world, it's 2024 and I'LL pay $1,234.56!",
    "  leading, double  and trailing  ",
    "line one\nline two\r\n\r\n\tthree\n\n",
    "naïve cafe\u0301 déjà-vu Å",
    "日本語 한국어 العربية हिन्दी",
    "👩‍🚀🙂 x²≠½",
    "def f(x):\n    return x**2  # camelCaseHTTPServer",
    "<s>text</s> <|end|>inside<|end|>",
    "",
]


def byte_vocabulary() -> tuple[list[str], list[str]]:
    """Bytes, a few merges, and two special tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for pair in (
        "h e",
        "l l",
        "he ll",
        "hell o",
        "Ġ w",
        "1 2",
        "2 0",
        "Ġ Ġ",
        "i n",
        "Ġ i",
        "c a",
        "f e",
    ):
        merges.append(pair)
        tokens.append(pair.replace(" ", ""))
    return [*tokens, "<s>", "</s>", "<|end|>"], merges


def metadata(pre: str, **overrides: Any) -> dict[str, Any]:
    tokens, merges = byte_vocabulary()
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
        **overrides,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def build(values: dict[str, Any], folder: Path) -> Tokenizer:
    write_tokenizer(values, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_text_survives_the_round_trip(pre: str, text: str, tmp_path: Path) -> None:
    import unicodedata

    tokenizer = build(metadata(pre, add_bos_token=False), tmp_path)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_equals_transformers(text: str, tmp_path: Path) -> None:
    tokens, merges = byte_vocabulary()
    reference = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        unk_token=None,
        eos_token="</s>",
        pad_token=None,
    )
    reference.add_special_tokens({"additional_special_tokens": ["<s>", "<|end|>"]})
    assert build(metadata("qwen2"), tmp_path).encode(text).ids == reference(text)["input_ids"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["x", "Ġ12345", "'s", "Ġ", "ĠABc"]),
        ("smollm", ["x", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "ĠABc"]),
        ("qwen2", ["x", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "ĠABc"]),
        ("llama-bpe", ["x", "Ġ", "123", "45", "'s", "Ġ", "ĠABc"]),
        ("tekken", ["x", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "ĠABc"]),
    ],
)
def test_each_kind_splits_digits_its_own_way(pre: str, expected: list[str], tmp_path: Path) -> None:
    assert pieces(build(metadata(pre), tmp_path), "x 12345's  ABc") == expected


def test_tekken_splits_at_a_change_of_case(tmp_path: Path) -> None:
    found = pieces(build(metadata("tekken"), tmp_path), "camelCaseHTTPServer")
    assert found == ["camel", "Case", "HTTPServer"]


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, ["<s>"], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<s>"], ["</s>"]),
    ],
)
def test_begin_and_end_are_added_as_the_metadata_says(
    pre: str, flags: dict[str, bool], before: list[str], after: list[str], tmp_path: Path
) -> None:
    tokens = build(metadata(pre, **flags), tmp_path).encode("x").tokens
    assert tokens == [*before, "x", *after]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab"]
    # "bc" beats "ab" by score: a reader that merges in vocabulary order would give ▁ab c.
    scores = [0.0] * (3 + 256) + [-9, -9, -9, -9, -3, -1, -4, -5]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *byte_tokens, *words],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = build(values, tmp_path)
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert tokenizer.encode("ab é").tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é"


def test_the_template_and_special_tokens_are_kept(tmp_path: Path) -> None:
    values = {**metadata("gpt-2"), "tokenizer.chat_template": "{{ messages }}"}
    build(values, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (metadata("hunyuan"), "pre-tokenizer: hunyuan. Supported: deepseek-r1-qwen, default"),
        (metadata("gpt-2", model="rwkv"), "tokenizer: rwkv. Supported: gpt2, llama"),
    ],
)
def test_an_unknown_kind_is_refused_by_name(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_tokenizer(values, tmp_path)


@pytest.mark.model
def test_smollm2_splits_each_digit(smollm2_gguf: Path, tmp_path: Path) -> None:
    open_checkpoint(smollm2_gguf).write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]
    chat = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.encode(chat).tokens[0] == "<|im_start|>"
    assert tokenizer.decode(tokenizer.encode(chat).ids, skip_special_tokens=False) == chat
