"""A decoder graph in the one dialect of all engines.

| input | shape | |
|---|---|---|
| input_ids, position_ids | [B, Q] int64 | |
| write_indices | [B] int64 | where each row's new cache entries go |
| attention_mask | [B, 1, Q, T] bool | true = may look; T is the longest valid length |
| logits_indices | [N] int64 | which of the B*Q flattened rows get logits |
| past_key_values.{i}.key, .value | [B, Hkv, S, D] fp32 | bound to the same memory as the outputs |

With latent attention a layer has `.key` alone (`export/mla.py`).

| output | shape | |
|---|---|---|
| logits | [N, V] fp32 | |
| present.{i}.key, .value | [B, Hkv, S, D] fp32 | |
"""

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
    rms_norm,
)
from specexport.export.manifest import WeightType
from specexport.export.mla import latent_attention
from specexport.export.moe import mixture_of_experts
from specexport.export.rope import rotary_tables

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
LM_HEAD_BIAS = "lm_head.bias"
_IR_VERSION = 11


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """The graph without weight data, and the recipes that produce the data."""

    model: ir.Model
    builder: GraphBuilder


@dataclass(frozen=True, slots=True)
class Layer:
    """Where a layer's weights lie, and its index, which decides between MLP and experts."""

    name: str
    index: int


def build_decoder(config: DecoderConfig, weight_type: WeightType, max_length: int) -> DecoderGraph:
    """Build the graph of `config` with rotary tables for `max_length` positions."""
    g = GraphBuilder(weight_type)
    input_ids = _input("input_ids", ir.DataType.INT64, "batch", "query")
    logits_indices = _input("logits_indices", ir.DataType.INT64, "num_logits")
    step = _step_values(g, config, max_length)
    pasts = [_cache_inputs("past_key_values", i, config) for i in range(config.num_layers)]

    hidden = embedding(g, input_ids, EMBEDDING, (config.vocab_size, config.hidden_size))
    presents = []
    for i, past in enumerate(pasts):
        layer = Layer(f"model.layers.{i}", i)
        hidden, present = decoder_layer(g, config, layer, hidden, step, past)
        presents.append(present)
    hidden = rms_norm(g, hidden, "model.norm", config.hidden_size, config.norm_eps)
    logits = _lm_head(g, config, hidden, logits_indices)

    outputs = [_output(logits, "logits", "num_logits", config.vocab_size)]
    for i, present in enumerate(presents):
        for value, kind in zip(present, config.cache_kinds, strict=True):
            outputs.append(_output(value, f"present.{i}.{kind}", *_cache_shape(config)))
    inputs = [
        input_ids,
        step.position_ids,
        step.write_indices,
        step.attention_mask,
        logits_indices,
        *(value for past in pasts for value in past),
    ]
    model = ir.Model(g.graph(inputs, outputs), ir_version=_IR_VERSION, producer_name="specexport")
    return DecoderGraph(model, g)


def decoder_layer(
    g: GraphBuilder,
    config: DecoderConfig,
    layer: Layer,
    x: ir.Value,  # [B, Q, H]
    step: StepValues,
    past: tuple[ir.Value, ...],
) -> tuple[ir.Value, tuple[ir.Value, ...]]:
    """`h = x + attention(norm(x))`, then `h + mlp(norm(h))`; also the updated cache.

    `past` holds one cache tensor for each of `config.cache_kinds`.
    """
    name, size, eps = layer.name, config.hidden_size, config.norm_eps
    normed = rms_norm(g, x, f"{name}.input_layernorm", size, eps)
    attended, present = _attention(g, config, normed, f"{name}.self_attn", step, past)
    h = g.op("Add", x, attended)
    normed = rms_norm(g, h, f"{name}.post_attention_layernorm", size, eps)
    return g.op("Add", h, _mlp(g, config, normed, layer)), present


def _attention(
    g: GraphBuilder,
    config: DecoderConfig,
    x: ir.Value,
    name: str,
    step: StepValues,
    past: tuple[ir.Value, ...],
) -> tuple[ir.Value, tuple[ir.Value, ...]]:
    if config.mla is not None:
        return latent_attention(g, x, name, config, step, past)
    shape = AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
        rotary_dim=config.rotary_dim,
        rope_interleaved=config.rope_interleaved,
    )
    return attention(g, x, name, shape, step, past)


def _mlp(g: GraphBuilder, config: DecoderConfig, x: ir.Value, layer: Layer) -> ir.Value:
    name, size, bias = f"{layer.name}.mlp", config.hidden_size, config.mlp_bias
    if config.moe is not None and layer.index not in config.moe.dense_layers:
        return mixture_of_experts(g, x, name, size, config.moe, shared_bias=bias)
    return gated_mlp(g, x, name, (size, config.intermediate_size), bias=bias)


def _lm_head(
    g: GraphBuilder, config: DecoderConfig, hidden: ir.Value, logits_indices: ir.Value
) -> ir.Value:
    """Logits of the wanted rows: [B, Q, H], [N] -> [N, V]. Tied models reuse the embedding."""
    flat = g.op("Reshape", hidden, g.ints(-1, config.hidden_size))
    wanted = g.op("Gather", flat, logits_indices, axis=0)
    name = EMBEDDING if config.tied_embeddings else LM_HEAD
    weight = g.to_fp32(g.matrix(name, config.vocab_size, config.hidden_size))
    bias = [g.vector(LM_HEAD_BIAS, config.vocab_size)] if config.lm_head_bias else []
    return g.op("Gemm", wanted, weight, *bias, transB=1)


def _step_values(g: GraphBuilder, config: DecoderConfig, max_length: int) -> StepValues:
    mask = _input("attention_mask", ir.DataType.BOOL, "batch", 1, "query", "valid_length")
    cos, sin = rotary_tables(config.rope, config.rotary_dim, max_length)
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


def _cache_inputs(prefix: str, layer: int, config: DecoderConfig) -> tuple[ir.Value, ...]:
    shape = _cache_shape(config)
    return tuple(
        _input(f"{prefix}.{layer}.{kind}", ir.DataType.FLOAT, *shape) for kind in config.cache_kinds
    )


def _input(name: str, dtype: ir.DataType, *shape: str | int) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _output(value: ir.Value, name: str, *shape: str | int) -> ir.Value:
    value.name, value.shape = name, ir.Shape(shape)
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return value
