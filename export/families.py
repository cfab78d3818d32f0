"""The model families that can be exported: how each one's `config.json` is read.

A family is one entry of `FAMILIES`. All of them share the tensor names and the layer of the
Llama lineage (transformers' `modeling_llama.py`, `modeling_mistral.py`, `modeling_qwen2.py`,
`modeling_qwen3.py`, …); an entry states what differs. Experts and latent attention are read by
`moe_config.py` and `mla_config.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specexport.errors import CheckpointError
from specexport.export.config import DecoderConfig, MlaConfig, MoeConfig
from specexport.export.config_values import ConfigValues, check_values
from specexport.export.family_defaults import (
    COMMON,
    DEEPSEEK,
    ERNIE,
    ERNIE_MOE,
    GLM4,
    QWEN,
    QWEN_MOE,
)
from specexport.export.fp8 import read_block_size
from specexport.export.mla_config import read_mla
from specexport.export.moe_config import read_deepseek_moe, read_ernie_moe, read_qwen3_moe
from specexport.export.rope_config import read_rope

Config = Mapping[str, Any]
_MAX_ROTARY_DIM = 4096  # tables are made for it before any weight is looked at


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one family's config. `defaults` are those of transformers' config class."""

    name: str
    defaults: dict[str, Any]
    features: Callable[[ConfigValues], dict[str, Any]]
    moe: Callable[[Config], MoeConfig] | None = None
    mla: Callable[[Config], MlaConfig] | None = None
    partial_rotary: bool = False
    """Whether the family honours `partial_rotary_factor`."""


def _llama_features(values: ConfigValues) -> dict[str, Any]:
    bias = values.attention_bias
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": values.mlp_bias}


def _mistral_features(values: ConfigValues) -> dict[str, Any]:
    return {"sliding_window": _window(values, first_windowed_layer=0)}


def _qwen2_features(values: ConfigValues) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_window(values)}


def _qwen3_features(values: ConfigValues) -> dict[str, Any]:
    return {
        "qkv_bias": values.attention_bias,
        "output_bias": values.attention_bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(values),
    }


def _qwen3_moe_features(values: ConfigValues) -> dict[str, Any]:
    window = _window(values, first_windowed_layer=0) if values.use_sliding_window else None
    return {**_qwen3_features(values), "sliding_window": window}


def _deepseek_features(values: ConfigValues) -> dict[str, Any]:
    return {"rope_interleaved": values.rope_interleave}


def _glm4_features(values: ConfigValues) -> dict[str, Any]:
    return {"qkv_bias": values.attention_bias, "qk_norm": values.use_qk_norm}


def _ernie_features(values: ConfigValues) -> dict[str, Any]:
    bias = values.use_bias
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias, "rope_interleaved": True}


def _ernie_moe_features(values: ConfigValues) -> dict[str, Any]:
    return {**_ernie_features(values), "lm_head_bias": values.use_bias}


def _qwen_window(values: ConfigValues) -> int | None:
    if not values.use_sliding_window:
        return None
    return _window(values, values.max_window_layers or 0)


def _window(values: ConfigValues, first_windowed_layer: int) -> int | None:
    """One mask serves all layers, so all must have the same window, or none."""
    if values.sliding_window is None:
        return None
    num_layers = values.num_hidden_layers
    kinds = values.layer_types or [
        "sliding_attention" if i >= first_windowed_layer else "full_attention"
        for i in range(num_layers)
    ]
    if len(kinds) == num_layers and set(kinds) == {"full_attention"}:
        return None
    if len(kinds) == num_layers and set(kinds) == {"sliding_attention"}:
        return values.sliding_window
    raise CheckpointError(
        f"config.json asks for {kinds.count('sliding_attention')} sliding-window layers (window "
        f"{values.sliding_window}) of {num_layers}; all layers or none are supported. "
        'If the published config says "use_sliding_window": false, restore that.'
    )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", {**COMMON, "max_position_embeddings": 2048}, _llama_features
    ),
    # A Mistral config without sliding_window means 4096; an explicit null means none.
    "MistralForCausalLM": Family(
        "mistral",
        {
            **COMMON,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        _mistral_features,
    ),
    "Qwen2ForCausalLM": Family("qwen2", {**COMMON, **QWEN}, _qwen2_features),
    "Qwen3ForCausalLM": Family("qwen3", {**COMMON, **QWEN, "head_dim": 128}, _qwen3_features),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", {**COMMON, **QWEN, **QWEN_MOE}, _qwen3_moe_features, moe=read_qwen3_moe
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        {**COMMON, **DEEPSEEK},
        _deepseek_features,
        moe=read_deepseek_moe,
        mla=read_mla,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {**COMMON, **GLM4},
        _glm4_features,
        moe=read_deepseek_moe,
        partial_rotary=True,
    ),
    # A Qwen2 body; its own modeling file adds the multi-token-prediction layers alone.
    "MiMoForCausalLM": Family("mimo", {**COMMON, **QWEN}, _qwen2_features),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        {**COMMON, **ERNIE, "num_key_value_heads": 2, "head_dim": 128},
        _ernie_features,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        {**COMMON, **ERNIE, **ERNIE_MOE},
        _ernie_moe_features,
        moe=read_ernie_moe,
    ),
}


def read_config(config: Config) -> DecoderConfig:
    """Turn a Hugging Face config into a `DecoderConfig`.

    Raises `CheckpointError` for an unknown architecture, a bad value or an unsupported feature.
    """
    architecture, family = _find_family(config)
    read_block_size(config)
    config = {**family.defaults, **config}
    values = check_values(ConfigValues, config, "config.json")
    if values.hidden_act not in ("silu", "swish"):
        raise CheckpointError(
            f"hidden_act is {values.hidden_act!r}; {architecture} is supported with 'silu' only."
        )
    num_heads = values.num_attention_heads
    num_kv_heads = values.num_key_value_heads or num_heads
    head_dim = values.head_dim or values.hidden_size // num_heads
    if (mla := family.mla(config) if family.mla else None) is not None:
        num_kv_heads, head_dim = 1, mla.entry_dim
    decoder = DecoderConfig(
        family=family.name,
        architecture=architecture,
        vocab_size=values.vocab_size,
        hidden_size=values.hidden_size,
        intermediate_size=values.intermediate_size,
        num_layers=values.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=values.rms_norm_eps,
        max_position=values.max_position_embeddings,
        rope=read_rope(config, values.max_position_embeddings),
        tied_embeddings=values.tie_word_embeddings,
        mla=mla,
        moe=family.moe(config) if family.moe else None,
        **family.features(values),
    )
    _check_partial_rotary(decoder, family)
    check_head_sizes(decoder)
    return decoder


def _check_partial_rotary(decoder: DecoderConfig, family: Family) -> None:
    factor = decoder.rope.partial_rotary_factor
    if factor != 1.0 and not family.partial_rotary:
        raise CheckpointError(
            f"partial_rotary_factor is {factor}; {decoder.architecture} is supported with 1.0 only."
        )


def check_head_sizes(decoder: DecoderConfig) -> None:
    """Raise `CheckpointError` for attention heads that fit neither each other nor the RoPE."""
    factors = decoder.rope.frequency_factors
    if decoder.num_heads % decoder.num_kv_heads or decoder.head_dim % 2 or decoder.head_dim < 4:
        raise CheckpointError(
            f"config.json has {decoder.num_heads} heads, {decoder.num_kv_heads} key-value heads "
            f"and head_dim {decoder.head_dim}: the first must be a multiple of the second and "
            "head_dim even and at least 4. The file is damaged or of another model."
        )
    if not 2 <= decoder.rotary_dim <= _MAX_ROTARY_DIM or decoder.rotary_dim % 2:
        raise CheckpointError(
            f"config.json rotates {decoder.rotary_dim} dimensions of a head; an even number from 2 "
            f"to {_MAX_ROTARY_DIM} is needed. The file is damaged or of another model."
        )
    if factors is not None and len(factors) != decoder.rotary_dim // 2:
        raise CheckpointError(
            f"The rotary embedding has {len(factors)} frequency factors; heads of "
            f"{decoder.head_dim} need {decoder.rotary_dim // 2}."
        )


def _find_family(config: Config) -> tuple[str, Family]:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    if not isinstance(names, list):
        raise CheckpointError(f"config.json: architectures is {names!r}; it must be a list.")
    if not names:  # configs written by hand often name the model type alone
        names = [key for key, family in FAMILIES.items() if family.name == model_type]
    for name in names:
        if family := FAMILIES.get(str(name)):
            if model_type not in (None, family.name):
                raise CheckpointError(
                    f"config.json contradicts itself: architectures says {name}, model_type says "
                    f"{model_type!r} instead of {family.name!r}. Restore the published config."
                )
            return str(name), family
    came = ", ".join(map(str, names)) or f"model_type {model_type!r}"
    raise CheckpointError(
        f"Unsupported architecture: {came}. Supported: {', '.join(sorted(FAMILIES))}."
    )
