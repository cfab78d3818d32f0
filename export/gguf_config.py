"""A GGUF file's metadata in the words of config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specexport.errors import CheckpointError
from specexport.export.gguf_tokenizer import special_token_id

Metadata = Mapping[str, Any]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral too: llama.cpp does not tell them apart
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Settings that change the computation in a way no supported family has; 0 means unset.
_REFUSED_SETTINGS = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.temperature_scale",
    "attention.sliding_window_pattern",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
_YARN_KEYS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Values of further `rope.scaling` keys that change nothing.
_NEUTRAL_SCALING = {
    "attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_log_multiplier": 0.0,
    "alpha": 0.0,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The metadata below the architecture's prefix."""

    architecture: str
    metadata: Metadata
    path: Path

    @classmethod
    def of(cls, metadata: Metadata, path: Path) -> "Settings":
        """Raises `CheckpointError` for what is not supported."""
        architecture = metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"{path} holds a model of architecture {architecture!r}. "
                f"Supported in GGUF: {', '.join(_ARCHITECTURES)}."
            )
        if (num_parts := int(metadata.get("split.count", 1))) > 1:
            raise CheckpointError(
                f"{path} is one of {num_parts} parts. Join them with llama.cpp's "
                "`llama-gguf-split --merge`."
            )
        settings = cls(architecture, metadata, path)
        for key in _REFUSED_SETTINGS:
            if settings.get(key):
                raise CheckpointError(
                    f"{path} sets {architecture}.{key} to {settings.get(key)}; models with that "
                    "setting are not supported."
                )
        return settings

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        """One setting; an array per layer counts as its one value."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.path} sets {self.architecture}.{key} differently per layer "
                    f"({value}), which is not supported."
                )
            value = value[0]
        # The file holds float32: its shortest decimal is what config.json said.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def require(self, key: str) -> Any:  # noqa: ANN401
        """One setting that must be there and not 0."""
        if not (value := self.get(key)):
            raise CheckpointError(
                f"{self.path} lacks the metadata {self.architecture}.{key}. "
                "Is it a language model, converted by llama.cpp?"
            )
        return value


def make_config(
    settings: Settings, shapes: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, Any]:
    """The metadata as config.json would say it."""
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{settings.path} lacks token_embd.weight. Is it a language model?")
    num_heads = settings.require("attention.head_count")
    hidden_size = settings.require("embedding_length")
    metadata = settings.metadata
    config = {
        "architectures": [_ARCHITECTURES[settings.architecture]],
        "model_type": settings.architecture,
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": settings.require("feed_forward_length"),
        "num_hidden_layers": settings.require("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.get("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(settings, hidden_size // num_heads),
        "rms_norm_eps": settings.require("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.require("context_length"),
        "rope_parameters": _rope_parameters(settings),
        "tie_word_embeddings": tied,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "hidden_act": "silu",
        "bos_token_id": special_token_id(metadata, "bos"),
        "eos_token_id": special_token_id(metadata, "eos"),
    }
    return config | _sliding_window(settings)


def _head_dim(settings: Settings, default: int) -> int:
    head_dim = int(
        settings.get("attention.key_length", settings.get("rope.dimension_count", default))
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := settings.get(key, head_dim)) != head_dim:
            raise CheckpointError(
                f"{settings.path} sets {settings.architecture}.{key} to {size}, but its heads have "
                f"{head_dim} dimensions; only equal sizes are supported."
            )
    return head_dim


def _sliding_window(settings: Settings) -> dict[str, Any]:
    """Mistral's window for a `llama` file; the other families name it per layer, GGUF does not."""
    window = settings.get("attention.sliding_window", 0)
    if not window or window >= settings.require("context_length"):
        return {}
    if settings.architecture != "llama":
        raise CheckpointError(
            f"{settings.path} sets {settings.architecture}.attention.sliding_window to {window}, "
            "but GGUF does not say for which layers. Give the Hugging Face checkpoint."
        )
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _rope_parameters(settings: Settings) -> dict[str, Any]:
    """Base and scaling; raises `CheckpointError` for a scaling that would be dropped."""
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0.0))
    rope_type = settings.get("rope.scaling.type", "linear")  # llama.cpp's default
    if rope_type not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{settings.path} has RoPE scaling of type {rope_type!r}. "
            "Supported in GGUF: none, linear, yarn."
        )
    if rope_type == "none" or factor in (0.0, 1.0):
        rope_type, scaling = "default", {}
    else:
        scaling = {"factor": factor} | (_yarn(settings) if rope_type == "yarn" else {})
    _refuse_other_scaling(settings, rope_type)
    return {
        "rope_type": rope_type,
        "rope_theta": settings.get("rope.freq_base", 10000.0),
        **scaling,
    }


def _yarn(settings: Settings) -> dict[str, Any]:
    values = {name: settings.get(f"rope.scaling.{key}") for key, name in _YARN_KEYS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    return {"original_max_position_embeddings": settings.require("context_length")} | given


def _refuse_other_scaling(settings: Settings, rope_type: str) -> None:
    """Raise `CheckpointError` for a `rope.scaling` key that would be dropped."""
    prefix = f"{settings.architecture}.rope.scaling."
    read = {"type", "factor", "finetuned", "original_context_length"}
    if rope_type == "yarn":
        read |= set(_YARN_KEYS)
    keys = {key.removeprefix(prefix) for key in settings.metadata if key.startswith(prefix)}
    for key in sorted(keys - read):
        if (value := settings.get(f"rope.scaling.{key}")) != _NEUTRAL_SCALING.get(key):
            raise CheckpointError(
                f"{settings.path} sets {prefix}{key} to {value}, which is not supported with "
                f"RoPE scaling {rope_type!r}."
            )
