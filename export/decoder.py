"""A decoder graph in the one dialect of all engines.

| input | shape | |
|---|---|---|
| input_ids, position_ids | [B, Q] int64 | |
| write_indices | [B] int64 | where each row's new cache entries go |
| attention_mask | [B, 1, Q, T] bool | true = may look; T is the longest valid length |
| logits_indices | [N] int64 | which of the B*Q flattened rows get logits |
| past_key_values.{i}.key, .value | [B, Hkv, S, D] fp32 | bound to the same memory as the outputs |

| output | shape | |
|---|---|---|
| logits | [N, V] fp32 | |
| hidden_states | [B, Q, n * H] fp32 | the taps that a head reads; only where there are some |
| present.{i}.key, .value | [B, Hkv, S, D] fp32 | |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from specexport.export.config import DecoderConfig
from specexport.export.layers import (
    AttentionShape,
    GraphBuilder,
    StepValues,
    attention,
    embedding,
    gated_mlp,
    lm_head,
    rms_norm,
    wanted_rows,
)
from specexport.export.manifest import FINAL_NORM, Tap, WeightType
from specexport.export.rope import rotary_tables

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_IR_VERSION = 11


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """The graph without weight data, and the recipes that produce the data."""

    model: ir.Model
    builder: GraphBuilder


def build_decoder(
    config: DecoderConfig, weight_type: WeightType, max_length: int, taps: Sequence[Tap] = ()
) -> DecoderGraph:
    """Build the graph of `config` with rotary tables for `max_length` positions.

    `hidden_states` joins the residual stream after the layers that `taps` name, in their order.
    """
    g = GraphBuilder(weight_type)
    input_ids = _input("input_ids", ir.DataType.INT64, "batch", "query")
    logits_indices = _input("logits_indices", ir.DataType.INT64, "num_logits")
    step = _step_values(g, config, max_length)
    pasts = [_cache_pair("past_key_values", i, config) for i in range(config.num_layers)]

    vocabulary = (config.vocab_size, config.hidden_size)
    hidden = embedding(g, input_ids, g.matrix(EMBEDDING, *vocabulary))
    streams: dict[Tap, ir.Value] = {-1: hidden}
    presents = []
    for i, past in enumerate(pasts):
        hidden, present = _layer(g, config, f"model.layers.{i}", hidden, step, past)
        streams[i] = hidden
        presents.append(present)
    hidden = rms_norm(g, hidden, "model.norm", config.hidden_size, config.norm_eps)
    streams[FINAL_NORM] = hidden
    weight = g.matrix(EMBEDDING if config.tied_embeddings else LM_HEAD, *vocabulary)
    logits = lm_head(g, wanted_rows(g, hidden, config.hidden_size, logits_indices), weight)

    outputs = [_output(logits, "logits", "num_logits", config.vocab_size)]
    if taps:
        tapped = g.op("Concat", *(streams[tap] for tap in taps), axis=-1)
        width = len(taps) * config.hidden_size
        outputs.append(_output(tapped, "hidden_states", "batch", "query", width))
    for i, pair in enumerate(presents):
        for value, kind in zip(pair, ("key", "value"), strict=True):
            outputs.append(_output(value, f"present.{i}.{kind}", *_cache_shape(config)))
    inputs = [
        input_ids,
        step.position_ids,
        step.write_indices,
        step.attention_mask,
        logits_indices,
        *(value for pair in pasts for value in pair),
    ]
    model = ir.Model(g.graph(inputs, outputs), ir_version=_IR_VERSION, producer_name="specexport")
    return DecoderGraph(model, g)


def _layer(
    g: GraphBuilder,
    config: DecoderConfig,
    name: str,
    x: ir.Value,
    step: StepValues,
    past: tuple[ir.Value, ir.Value],
) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
    """`h = x + attention(norm(x))`, then `h + mlp(norm(h))`."""
    size, eps = config.hidden_size, config.norm_eps
    shape = AttentionShape(
        hidden_size=size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=eps,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
    )
    normed = rms_norm(g, x, f"{name}.input_layernorm", size, eps)
    attended, present = attention(g, normed, f"{name}.self_attn", shape, step, past)
    h = g.op("Add", x, attended)
    normed = rms_norm(g, h, f"{name}.post_attention_layernorm", size, eps)
    sizes = (size, config.intermediate_size)
    return g.op("Add", h, gated_mlp(g, normed, f"{name}.mlp", sizes, bias=config.mlp_bias)), present


def _step_values(g: GraphBuilder, config: DecoderConfig, max_length: int) -> StepValues:
    mask = _input("attention_mask", ir.DataType.BOOL, "batch", 1, "query", "valid_length")
    cos, sin = rotary_tables(config.rope, config.head_dim, max_length)
    return StepValues(
        position_ids=_input("position_ids", ir.DataType.INT64, "batch", "query"),
        write_indices=_input("write_indices", ir.DataType.INT64, "batch"),
        attention_mask=mask,
        valid_length=g.op("Shape", mask, start=3, end=4),
        cos=g.table("rotary.cos", cos),
        sin=g.table("rotary.sin", sin),
    )


def _cache_shape(config: DecoderConfig) -> tuple[str | int, ...]:
    return ("batch", config.num_kv_heads, "cache_length", config.head_dim)


def _cache_pair(prefix: str, layer: int, config: DecoderConfig) -> tuple[ir.Value, ir.Value]:
    shape = _cache_shape(config)
    return (
        _input(f"{prefix}.{layer}.key", ir.DataType.FLOAT, *shape),
        _input(f"{prefix}.{layer}.value", ir.DataType.FLOAT, *shape),
    )


def _input(name: str, dtype: ir.DataType, *shape: str | int) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _output(value: ir.Value, name: str, *shape: str | int) -> ir.Value:
    value.name, value.shape = name, ir.Shape(shape)
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return value
