"""GGUF's tokenizer metadata → tokenizer.json and tokenizer_config.json.

A GGUF names a kind of text splitting (`tokenizer.ggml.pre`) instead of spelling it out; the tables
below hold what the kinds' published tokenizer.json files say. Kinds not known to be exact are
refused: a text split otherwise gives the model tokens that it never saw.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specexport.errors import CheckpointError

Metadata = Mapping[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(number: str) -> str:
    """The pattern of tiktoken's cl100k vocabulary, with its own rule for numbers."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level vocabulary cuts text before merging."""

    pattern: str | None = None
    """None: GPT-2's own."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    """What holds where the file has no `add_bos_token`."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[Any] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        use_regex = self.pattern is None
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
        return pre_tokenizers.Sequence(steps)


_GPT2 = _Split()
_DIGITS = _Split(single_digits=True)
_QWEN2 = _Split(_words(r"\p{N}"), nfc=True)
_LLAMA3 = _Split(_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_TEKKEN = _Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ignore_merges=True,
    add_bos=True,
)
_SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _TEKKEN,
}

_ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}  # where the file is silent, as llama.cpp


def write_tokenizer(metadata: Metadata, source: str, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Raises `CheckpointError`, naming `source`, for a kind of tokenizer that is not supported.
    """
    build_tokenizer(metadata, source).save(str(directory / "tokenizer.json"))
    text = json.dumps(tokenizer_config(metadata, source), ensure_ascii=False, indent=2)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(metadata: Metadata, source: str) -> Tokenizer:
    """A tokenizer that gives the same ids as the one the model was published with."""
    vocabulary = _Vocabulary.read(metadata, source)
    build = _MODELS[_model(metadata, source)]
    tokenizer = build(vocabulary, metadata, source)
    _add_special_tokens(tokenizer, vocabulary)
    _add_post_processor(tokenizer, metadata, source)
    return tokenizer


def tokenizer_config(metadata: Metadata, source: str) -> dict[str, Any]:
    """As tokenizer_config.json; special tokens and chat template only where the file has them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "add_bos_token": _adds_bos(metadata, source),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for role in ("bos", "eos", "unk", "pad"):
        if (token_id := special_token_id(metadata, role)) is not None:
            config[f"{role}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def special_token_id(metadata: Metadata, role: str) -> int | None:
    """Id of the bos, eos, eot, eom, unk or pad token; None where there is none."""
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    default = _SENTENCEPIECE_IDS.get(role) if is_sentencepiece else None
    token_id = metadata.get(f"tokenizer.ggml.{_ID_KEYS[role]}", default)
    # Some converters write -1 (as 2^32 - 1) for "none".
    if token_id is None or not 0 <= token_id < len(metadata.get("tokenizer.ggml.tokens", ())):
        return None
    return int(token_id)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id, their types and, for a SentencePiece vocabulary, their scores."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]

    @classmethod
    def read(cls, metadata: Metadata, source: str) -> "_Vocabulary":
        """Raises `CheckpointError` for a vocabulary that is missing or contradicts itself."""
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise CheckpointError(
                f"{source} holds no tokenizer (no tokenizer.ggml.tokens). Convert the model again, "
                "with its tokenizer files beside it."
            )
        types = [int(t) for t in metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))]
        scores = [float(s) for s in metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))]
        merges = [tuple(m.split(" ")) for m in metadata.get("tokenizer.ggml.merges", ())]
        lengths_agree = len(types) == len(scores) == len(tokens)
        if len(set(tokens)) != len(tokens) or not lengths_agree or {len(m) for m in merges} - {2}:
            raise CheckpointError(
                f"{source} has a damaged tokenizer: {len(tokens)} tokens ({len(set(tokens))} "
                f"different), {len(types)} types, {len(scores)} scores, or merges that are no "
                "pairs. Download it or convert the model again."
            )
        return cls(list(tokens), types, scores, merges)

    def ids(self) -> dict[str, int]:
        """Tokens → ids, without the names that converters give to unused rows."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if not (kind == _UNUSED and token == f"[PAD{token_id}]")
        }


def _model(metadata: Metadata, source: str) -> str:
    model = metadata.get("tokenizer.ggml.model")
    if model not in _MODELS:
        raise CheckpointError(
            f"{source} has a tokenizer of model {model!r}. Supported: {', '.join(_MODELS)}. "
            "Give the Hugging Face checkpoint."
        )
    return str(model)


def _find_split(metadata: Metadata, source: str) -> _Split:
    kind = metadata.get("tokenizer.ggml.pre")
    if kind not in _SPLITS:
        raise CheckpointError(
            f"{source} splits text by the kind {kind!r} (tokenizer.ggml.pre). Supported: "
            f"{', '.join(_SPLITS)}. Give the Hugging Face checkpoint, or, where the kind is "
            "missing or 'default', a file made by a newer llama.cpp."
        )
    return _SPLITS[kind]


def _byte_level(vocabulary: _Vocabulary, metadata: Metadata, source: str) -> Tokenizer:
    split = _find_split(metadata, source)
    model = models.BPE(
        vocab=vocabulary.ids(), merges=vocabulary.merges, ignore_merges=split.ignore_merges
    )
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary, metadata: Metadata, source: str) -> Tokenizer:
    """Llama 2's and Mistral's tokenizer.json: spaces become ▁, unknown characters bytes."""
    unknown = special_token_id(metadata, "unk")
    model = models.BPE(
        vocab=vocabulary.ids(),
        merges=vocabulary.merges or _merges_from_scores(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    prepend = [normalizers.Prepend(_SPACE)] if add_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if add_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


_MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best-scored token first.

    SentencePiece merges the pair whose result scores best. Pairs with equal results are ordered as
    in published conversions: longer left part first, then longer right part.
    """
    ids = {
        token: token_id
        for token_id, (token, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if kind in (_NORMAL, _UNUSED)
    }
    ranked = sorted(
        (-vocabulary.scores[token_id], -cut, cut - len(token), token_id, token)
        for token, token_id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    )
    return [(token[:-minus], token[-minus:]) for _, minus, _, _, token in ranked]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are only kept whole."""
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _adds_bos(metadata: Metadata, source: str) -> bool:
    is_sentencepiece = _model(metadata, source) == "llama"
    default = is_sentencepiece or _find_split(metadata, source).add_bos
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _add_post_processor(tokenizer: Tokenizer, metadata: Metadata, source: str) -> None:
    """Put the tokens around a text that the model expects there."""
    wanted = {
        "bos": _adds_bos(metadata, source),
        "eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    roles = [role for role, is_wanted in wanted.items() if is_wanted]
    if not roles:
        return
    special: list[Any] = []
    for role in roles:
        token_id = special_token_id(metadata, role)
        if token_id is None:
            raise CheckpointError(
                f"{source} wants a {role} token around every text but names none "
                f"(tokenizer.ggml.{_ID_KEYS[role]}). Convert the model again."
            )
        token = metadata["tokenizer.ggml.tokens"][token_id]
        special.append({"id": role, "ids": [token_id], "tokens": [token]})
    first = ["bos"] if "bos" in roles else []
    last = ["eos"] if "eos" in roles else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)],
        special_tokens=special,
    )
