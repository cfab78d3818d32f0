"""Multi-head latent attention's settings in config.json (DeepSeek-V3's keys)."""

from collections.abc import Mapping
from typing import Any

from specexport.export.config import MlaConfig
from specexport.export.config_values import Size, Strict, check_values


class _Mla(Strict):
    kv_lora_rank: Size
    q_lora_rank: Size | None
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    attention_bias: bool


def read_mla(config: Mapping[str, Any]) -> MlaConfig:
    """Read the sizes; raises `CheckpointError` naming the first that is wrong."""
    values = check_values(_Mla, config, "config.json, latent attention")
    return MlaConfig(
        kv_lora_rank=values.kv_lora_rank,
        q_lora_rank=values.q_lora_rank,
        qk_nope_head_dim=values.qk_nope_head_dim,
        qk_rope_head_dim=values.qk_rope_head_dim,
        v_head_dim=values.v_head_dim,
        bias=values.attention_bias,
    )
