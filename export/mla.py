"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with the up-projections absorbed.

Keys and values are linear in a small latent, so the cache holds the latent: one tensor a layer,
`past_key_values.{i}.key` [B, 1, S, C + R], whose entry is the normalised latent (C), then the
rotated key that all heads share (R). It serves as key and as value of one `Attention`, which makes
both the same size; the part of the output behind the latent is cut off.

    scores  (W_UK^T q_nope)·latent + q_rope·k_rope     instead of q·(W_UK latent ++ k_rope)
    output  W_UV (sum of p·latent)                     instead of the sum of p·(W_UV latent)

W_UK and W_UV are cut from `kv_b_proj.weight`, a block of rows a head, when the weights are written.
"""

import onnx_ir as ir

from specexport.export.config import DecoderConfig, MlaConfig
from specexport.export.layers import (
    GraphBuilder,
    HeadRows,
    StepValues,
    join_heads,
    linear,
    rms_norm,
    rotate,
    split_heads,
    valid_entries,
    write_cache,
)
from specexport.export.rope import softmax_scale

_LATENT_NORM_EPS = 1e-6  # the norms of the latents do not follow rms_norm_eps


def latent_attention(
    g: GraphBuilder,
    x: ir.Value,  # [B, Q, attention_width]
    name: str,
    config: DecoderConfig,
    step: StepValues,
    past: tuple[ir.Value, ...],  # one tensor, [B, 1, S, C + R]
) -> tuple[ir.Value, tuple[ir.Value, ...]]:
    """Attention over the latents after writing this step's into the cache."""
    assert config.mla is not None
    mla, num_heads = config.mla, config.num_heads
    up_key, up_value = _up_projections(g, name, mla, num_heads)
    query = _query(g, x, name, config, up_key, step)
    (past_entries,) = past
    present = write_cache(g, past_entries, _entry(g, x, name, config, step), step)
    entries = valid_entries(g, present, step)
    scale = mla.qk_head_dim**-0.5 * softmax_scale(config.rope)
    context = g.op(  # [B, heads, Q, C + R]
        "Attention", query, entries, entries, step.attention_mask, scale=scale
    )
    latent = g.op("Slice", context, g.ints(0), g.ints(mla.kv_lora_rank), g.ints(-1))
    width = num_heads * mla.v_head_dim
    heads = join_heads(g, g.op("MatMul", latent, up_value), width)
    sizes = (width, config.hidden_size)
    return linear(g, heads, f"{name}.o_proj", sizes, bias=mla.bias), (present,)


def _query(
    g: GraphBuilder,
    x: ir.Value,
    name: str,
    config: DecoderConfig,
    up_key: ir.Value,
    step: StepValues,
) -> ir.Value:
    """Queries as they meet the cache entries: [B, Q, attention_width] -> [B, heads, Q, C + R]."""
    assert config.mla is not None
    mla, size_in = config.mla, config.attention_width
    width = config.num_heads * mla.qk_head_dim
    if (rank := mla.q_lora_rank) is None:
        query = linear(g, x, f"{name}.q_proj", (size_in, width), bias=False)
    else:
        latent = linear(g, x, f"{name}.q_a_proj", (size_in, rank), bias=mla.bias)
        latent = rms_norm(g, latent, f"{name}.q_a_layernorm", rank, _LATENT_NORM_EPS)
        query = linear(g, latent, f"{name}.q_b_proj", (rank, width), bias=False)
    query = split_heads(g, query, config.num_heads, mla.qk_head_dim)
    nope, rope = g.ops(
        "Split", 2, query, g.ints(mla.qk_nope_head_dim, mla.qk_rope_head_dim), axis=-1
    )
    rotated = rotate(g, rope, step, interleaved=config.rope_interleaved)
    return g.op("Concat", g.op("MatMul", nope, up_key), rotated, axis=-1)


def _entry(
    g: GraphBuilder, x: ir.Value, name: str, config: DecoderConfig, step: StepValues
) -> ir.Value:
    """New cache entries: [B, Q, attention_width] -> [B, 1, Q, C + R]."""
    assert config.mla is not None
    mla = config.mla
    sizes = (config.attention_width, mla.entry_dim)
    both = linear(g, x, f"{name}.kv_a_proj_with_mqa", sizes, bias=mla.bias)
    both = g.op("Unsqueeze", both, g.ints(1))
    latent, key = g.ops("Split", 2, both, g.ints(mla.kv_lora_rank, mla.qk_rope_head_dim), axis=-1)
    latent = rms_norm(g, latent, f"{name}.kv_a_layernorm", mla.kv_lora_rank, _LATENT_NORM_EPS)
    return g.op(
        "Concat", latent, rotate(g, key, step, interleaved=config.rope_interleaved), axis=-1
    )


def _up_projections(
    g: GraphBuilder, name: str, mla: MlaConfig, num_heads: int
) -> tuple[ir.Value, ir.Value]:
    """W_UK [heads, nope, C] and W_UV^T [heads, C, v]."""
    nope, size_out = mla.qk_nope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
    source, shape = f"{name}.kv_b_proj.weight", (num_heads * size_out, mla.kv_lora_rank)
    key_rows, value_rows = HeadRows(num_heads, 0, nope), HeadRows(num_heads, nope, size_out)
    up_key = g.head_matrices(f"{name}.up_key", source, shape, key_rows, transpose=False)
    up_value = g.head_matrices(f"{name}.up_value", source, shape, value_rows, transpose=True)
    return g.to_fp32(up_key), g.to_fp32(up_value)
