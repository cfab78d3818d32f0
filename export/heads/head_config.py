"""The numbers that define the layers of an EAGLE head, from its config.json and its file."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from specexport.errors import CheckpointError
from specexport.export.config import DecoderConfig, MlaConfig
from specexport.export.config_values import ConfigValues, check_values
from specexport.export.families import check_head_sizes
from specexport.export.family_defaults import DEEPSEEK
from specexport.export.mla_config import read_mla
from specexport.export.rope_config import read_rope

# Those of transformers' LlamaConfig, the class of nearly all heads; latent ones have DeepSeek's.
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_LAYER = re.compile(r"layers\.([0-9]+)\.")
_ATTENTION, _MLP = "layers.0.self_attn", "layers.0.mlp"
_LATENT = f"{_ATTENTION}.kv_a_proj_with_mqa"


def read_head_config(
    config: Mapping[str, Any], names: Collection[str], family: str, vocab_size: int
) -> DecoderConfig:
    """The head's layers as a `DecoderConfig` that predicts `vocab_size` tokens.

    Latent attention, biases and query-key norms are believed from `names` (as the graphs call
    them), since head configs are often silent or wrong about them.
    """
    where = "config.json of the head"
    if config.get("quantization_config"):
        raise CheckpointError("The head is quantized. Give the unquantized head.")
    given = {key: value for key, value in config.items() if value is not None}
    is_latent = f"{_LATENT}.weight" in names
    defaults = {**_DEFAULTS, **DEEPSEEK} if is_latent else _DEFAULTS
    values = check_values(ConfigValues, {**defaults, **given}, where)
    if values.hidden_act not in ("silu", "swish"):
        raise CheckpointError(
            f"{where}: hidden_act is {values.hidden_act!r}; heads are supported with 'silu' only."
        )
    num_heads = values.num_attention_heads
    num_kv_heads = values.num_key_value_heads or num_heads
    head_dim = values.head_dim or values.hidden_size // num_heads
    mla = _read_mla(config, names) if is_latent else None
    if mla is not None:
        num_kv_heads, head_dim = 1, mla.entry_dim
    decoder = DecoderConfig(
        family=family,
        architecture=_architecture(config),
        vocab_size=vocab_size,
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
        qkv_bias=f"{_ATTENTION}.q_proj.bias" in names,
        output_bias=f"{_ATTENTION}.o_proj.bias" in names,
        mlp_bias=f"{_MLP}.gate_proj.bias" in names,
        qk_norm=f"{_ATTENTION}.q_norm.weight" in names,
        sliding_window=_window(values),
        rope_interleaved=is_latent and values.rope_interleave,
        mla=mla,
    )
    check_head_sizes(decoder)
    _check_layers(decoder.num_layers, names)
    return decoder


def _read_mla(config: Mapping[str, Any], names: Collection[str]) -> MlaConfig:
    return read_mla({**DEEPSEEK, **config, "attention_bias": f"{_LATENT}.bias" in names})


def _check_layers(num_layers: int, names: Collection[str]) -> None:
    """A number far above the file's would be built layer by layer before anything is missed."""
    layers = {match[1] for name in names if (match := _LAYER.match(name))}
    if num_layers > len(layers):
        raise CheckpointError(
            f"config.json of the head: num_hidden_layers is {num_layers}, but the weights are "
            f"those of {len(layers)} layer(s). Is the download complete, and config.json of this "
            "head?"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "unknown"


def _window(values: ConfigValues) -> int | None:
    """One mask serves all layers of a head, so all must have the same window, or none."""
    kinds = (values.layer_types or [])[: values.num_hidden_layers]
    if "sliding_attention" not in kinds:
        return None
    if set(kinds) != {"sliding_attention"} or values.sliding_window is None:
        raise CheckpointError(
            f"config.json of the head: layer_types is {kinds} with the window "
            f"{values.sliding_window}; all layers with one window, or none, are supported."
        )
    return values.sliding_window
