"""The model families that can be exported: how each one's `config.json` is read.

A family is one entry of `FAMILIES`. All of them share the tensor names and the layer of the
Llama lineage (transformers' `modeling_llama.py`, `modeling_mistral.py`, `modeling_qwen2.py`,
`modeling_qwen3.py`); an entry states what differs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specexport.errors import CheckpointError
from specexport.export.config import DecoderConfig
from specexport.export.rope_config import read_rope

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one family's config. `defaults` are those of transformers' config class."""

    name: str
    defaults: dict[str, Any]
    features: Callable[[Config], dict[str, Any]] = field(default=lambda config: {})


def _llama_features(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def _mistral_features(config: Config) -> dict[str, Any]:
    # transformers: a config without the key means a window of 4096, an explicit null means none.
    return {"sliding_window": config.get("sliding_window", 4096)}


def _qwen2_features(config: Config) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_window(config)}


def _qwen3_features(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(config),
    }


def _qwen_window(config: Config) -> int | None:
    """Qwen names a window per layer; one mask serves all layers, so all must agree."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        return None
    num_layers = int(config["num_hidden_layers"])
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = int(config.get("max_window_layers", 28))
        layer_types = ["full_attention"] * min(first, num_layers)
        layer_types += ["sliding_attention"] * (num_layers - len(layer_types))
    if all(kind == "full_attention" for kind in layer_types):
        return None
    if all(kind == "sliding_attention" for kind in layer_types):
        return int(config.get("sliding_window", 4096))
    raise CheckpointError(
        "This checkpoint mixes sliding-window and full-attention layers (use_sliding_window with "
        f"max_window_layers {config.get('max_window_layers')}), which is not supported yet. "
        'If the published config says "use_sliding_window": false, restore that.'
    )


_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", {**_COMMON, "max_position_embeddings": 2048}, _llama_features
    ),
    "MistralForCausalLM": Family(
        "mistral",
        {**_COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8},
        _mistral_features,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {**_COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 32},
        _qwen2_features,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {
            **_COMMON,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        _qwen3_features,
    ),
}


def read_config(config: Config) -> DecoderConfig:
    """Turn a Hugging Face config into a `DecoderConfig`.

    Raises `CheckpointError` for an unknown architecture, a missing key or an unsupported feature.
    """
    architecture, family = _find_family(config)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"The checkpoint is quantized ({method}). Give the unquantized checkpoint; "
            "specexport quantizes by itself."
        )
    values = {**family.defaults, **config}
    if values["hidden_act"] != "silu":
        raise CheckpointError(
            f"hidden_act is {values['hidden_act']!r}; {architecture} is supported with 'silu' only."
        )
    hidden_size, num_heads = _int(values, "hidden_size"), _int(values, "num_attention_heads")
    head_dim = values.get("head_dim")
    max_position = _int(values, "max_position_embeddings")
    num_kv_heads = values.get("num_key_value_heads")
    decoder = DecoderConfig(
        family=family.name,
        architecture=architecture,
        vocab_size=_int(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(values, "intermediate_size"),
        num_layers=_int(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else int(num_kv_heads),
        head_dim=hidden_size // num_heads if head_dim is None else int(head_dim),
        norm_eps=float(values["rms_norm_eps"]),
        max_position=max_position,
        rope=read_rope(config, max_position),
        tied_embeddings=bool(values["tie_word_embeddings"]),
        **family.features(config),
    )
    if decoder.num_heads % decoder.num_kv_heads or decoder.head_dim % 2:
        raise CheckpointError(
            f"config.json has {decoder.num_heads} heads, {decoder.num_kv_heads} key-value heads "
            f"and head_dim {decoder.head_dim}: the first must be a multiple of the second and "
            "head_dim even. The file is damaged or of another model."
        )
    return decoder


def _find_family(config: Config) -> tuple[str, Family]:
    names = list(config.get("architectures") or [])
    if not names:  # configs written by hand often name the model type alone
        names = [key for key, f in FAMILIES.items() if f.name == config.get("model_type")]
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    came = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise CheckpointError(
        f"Unsupported architecture: {came}. Supported: {', '.join(sorted(FAMILIES))}."
    )


def _int(values: Mapping[str, Any], key: str) -> int:
    if not isinstance(values.get(key), int) or values[key] <= 0:
        raise CheckpointError(
            f"config.json needs a positive integer {key!r}; it has {values.get(key)!r}. "
            "Is the download complete?"
        )
    return int(values[key])
