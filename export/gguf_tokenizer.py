"""A GGUF file's tokenizer as tokenizer.json, splitting text as the upstream tokenizer does.

The metadata names a vocabulary and a kind of pre-tokenizer (`tokenizer.ggml.pre`); the splitting
rules of each kind are those of the upstream tokenizer.json files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

_CONTROL, _USER_DEFINED = 3, 4
_PREFIX = "tokenizer.ggml."

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a byte-level kind splits; `pattern` None is GPT-2's own rule."""

    pattern: str | None = None
    split_digits: bool = False
    normalize_nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_KINDS: dict[str, _Kind] = {
    "default": _Kind(),
    "gpt-2": _Kind(),
    "smollm": _Kind(split_digits=True),
    "qwen2": _Kind(_WORDS + r"|\p{N}" + _SIGNS + _TAIL, normalize_nfc=True),
    "llama-bpe": _Kind(_WORDS + r"|\p{N}{1,3}" + _SIGNS + _TAIL, ignore_merges=True, adds_bos=True),
    "tekken": _Kind(
        _TEKKEN_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL,
        ignore_merges=True,
        adds_bos=True,
    ),
}
_KINDS |= {"llama3": _KINDS["llama-bpe"], "llama-v3": _KINDS["llama-bpe"]}
_KINDS |= {"deepseek-r1-qwen": _KINDS["qwen2"]}


def write_tokenizer(metadata: Metadata, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; raises `CheckpointError` on other kinds."""
    model = metadata.get(f"{_PREFIX}model")
    if model not in _BUILDERS:
        raise CheckpointError(
            f"Unsupported GGUF tokenizer: {model}. Supported: {', '.join(sorted(_BUILDERS))}."
        )
    vocabulary = _Vocabulary.read(metadata)
    tokenizer, adds_bos = _BUILDERS[model](metadata, vocabulary)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in vocabulary.control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in vocabulary.user_defined])
    _add_post_processor(tokenizer, metadata, vocabulary, adds_bos)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_config(metadata, vocabulary, directory)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id, and those that are matched in text as they stand."""

    tokens: Sequence[str]
    control: list[str] = field(default_factory=list)
    user_defined: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, metadata: Metadata) -> "_Vocabulary":
        tokens = metadata.get(f"{_PREFIX}tokens") or []
        types = metadata.get(f"{_PREFIX}token_type") or [1] * len(tokens)
        pairs = list(zip(tokens, types, strict=True))
        return cls(
            tokens,
            [token for token, kind in pairs if kind == _CONTROL],
            [token for token, kind in pairs if kind == _USER_DEFINED],
        )

    def special(self, metadata: Metadata, name: str) -> str | None:
        """The token that the metadata names as bos, eos and so on."""
        token_id = metadata.get(f"{_PREFIX}{name}_token_id")
        return self.tokens[token_id] if token_id is not None else None


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """GPT-2's byte-level BPE; the flag says whether a BOS token is added by default."""
    name = metadata.get(f"{_PREFIX}pre", "default")
    if name not in _KINDS:
        raise CheckpointError(
            f"Unsupported GGUF pre-tokenizer: {name}. Supported: {', '.join(sorted(_KINDS))}. "
            "Build from the Hugging Face checkpoint instead."
        )
    kind = _KINDS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(f"{_PREFIX}merges") or []]
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges)
    tokenizer = Tokenizer(bpe)
    if kind.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.adds_bos


def _pre_tokenizer(kind: _Kind) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.split_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    use_regex = kind.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it."""
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = _merges_from_scores(vocab, metadata[f"{_PREFIX}scores"])
    unknown = vocabulary.special(metadata, "unknown")
    bpe = models.BPE(
        vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    adds_space = metadata.get(f"{_PREFIX}add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps scores, not merges: a better-scored piece is merged earlier."""
    ranked = []
    for piece, token_id in vocab.items():
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        pairs = [(left, right) for left, right in halves if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked.extend((-scores[token_id], pair) for pair in pairs)
    ranked.sort(key=lambda item: item[0])  # stable: pairs of one piece stay in order
    return [pair for _, pair in ranked]


_BUILDERS: dict[Any, Callable[[Metadata, _Vocabulary], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _add_post_processor(
    tokenizer: Tokenizer, metadata: Metadata, vocabulary: _Vocabulary, adds_bos: bool
) -> None:
    """BOS before and EOS after a text, where the metadata (or the kind's default) asks for them."""
    bos = vocabulary.special(metadata, "bos")
    eos = vocabulary.special(metadata, "eos")
    before = [bos] if bos is not None and metadata.get(f"{_PREFIX}add_bos_token", adds_bos) else []
    after = [eos] if eos is not None and metadata.get(f"{_PREFIX}add_eos_token", False) else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[
                (t, tokenizer.token_to_id(t)) for t in dict.fromkeys([*before, *after])
            ],
        )


def _write_config(metadata: Metadata, vocabulary: _Vocabulary, directory: Path) -> None:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {key: vocabulary.special(metadata, name) for key, name in names.items()}
    config["chat_template"] = metadata.get("tokenizer.chat_template")
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
