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
| hidden_states | [B, Q, n * H] fp32 | the taps that a head reads; only where there are some |
| present.{i}.key, .value | [B, Hkv, S, D] fp32 | |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from specexport.export.config import DecoderConfig
from specexport.export.graph_io import (
    CachePair,
    DecoderGraph,
    cache_inputs,
    cache_outputs,
    close_graph,
    graph_input,
    graph_output,
    step_values,
)
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
from specexport.export.manifest import FINAL_NORM, FloatType, Tap
from specexport.export.mla import latent_attention
from specexport.export.moe import mixture_of_experts

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
LM_HEAD_BIAS = "lm_head.bias"


@dataclass(frozen=True, slots=True)
class Layer:
    """Where a layer's weights lie, and its index, which decides between MLP and experts."""

    name: str
    index: int


def build_decoder(
    config: DecoderConfig, weight_type: FloatType, max_length: int, taps: Sequence[Tap] = ()
) -> DecoderGraph:
    """Build the graph of `config` with rotary tables for `max_length` positions.

    `hidden_states` joins the residual stream after the layers that `taps` name, in their order.
    """
    g = GraphBuilder(weight_type)
    input_ids = graph_input("input_ids", ir.DataType.INT64, "batch", "query")
    logits_indices = graph_input("logits_indices", ir.DataType.INT64, "num_logits")
    step = step_values(g, config, max_length)
    pasts = cache_inputs(config)

    vocabulary = (config.vocab_size, config.hidden_size)
    hidden = embedding(g, input_ids, g.matrix(EMBEDDING, *vocabulary))
    streams: dict[Tap, ir.Value] = {-1: hidden}
    presents = []
    for i, past in enumerate(pasts):
        layer = Layer(f"model.layers.{i}", i)
        hidden, present = decoder_layer(g, config, layer, hidden, step, past)
        streams[i] = hidden
        presents.append(present)
    hidden = rms_norm(g, hidden, "model.norm", config.hidden_size, config.norm_eps)
    streams[FINAL_NORM] = hidden
    weight = g.matrix(EMBEDDING if config.tied_embeddings else LM_HEAD, *vocabulary)
    bias = g.vector(LM_HEAD_BIAS, config.vocab_size) if config.lm_head_bias else None
    logits = lm_head(g, wanted_rows(g, hidden, config.hidden_size, logits_indices), weight, bias)

    outputs = [graph_output(logits, "logits", "num_logits", config.vocab_size)]
    if taps:
        tapped = g.op("Concat", *(streams[tap] for tap in taps), axis=-1)
        width = len(taps) * config.hidden_size
        outputs.append(graph_output(tapped, "hidden_states", "batch", "query", width))
    inputs = [
        input_ids,
        step.position_ids,
        step.write_indices,
        step.attention_mask,
        logits_indices,
        *(value for past in pasts for value in past),
    ]
    return close_graph(g, inputs, [*outputs, *cache_outputs(config, presents)])


def decoder_layer(
    g: GraphBuilder,
    config: DecoderConfig,
    layer: Layer,
    x: ir.Value,  # [B, Q, H]
    step: StepValues,
    past: CachePair,
) -> tuple[ir.Value, CachePair]:
    """`h = x + attention(norm(x))`, then `h + mlp(norm(h))`; also the updated cache.

    `past` holds one cache tensor for each of `config.cache_kinds`.
    """
    name, size, eps = layer.name, config.hidden_size, config.norm_eps
    normed = rms_norm(g, x, f"{name}.input_layernorm", size, eps)
    attended, present = attention_layer(g, config, normed, f"{name}.self_attn", step, past)
    h = g.op("Add", x, attended)
    normed = rms_norm(g, h, f"{name}.post_attention_layernorm", size, eps)
    return g.op("Add", h, _mlp(g, config, normed, layer)), present


def attention_layer(
    g: GraphBuilder,
    config: DecoderConfig,
    x: ir.Value,  # [B, Q, attention_width]
    name: str,
    step: StepValues,
    past: CachePair,
) -> tuple[ir.Value, CachePair]:
    """Grouped-query or latent attention, as `config` has it: [B, Q, H], and the updated cache."""
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
        input_size=config.attention_width,
    )
    return attention(g, x, name, shape, step, past)


def _mlp(g: GraphBuilder, config: DecoderConfig, x: ir.Value, layer: Layer) -> ir.Value:
    name, size, bias = f"{layer.name}.mlp", config.hidden_size, config.mlp_bias
    if config.moe is not None and config.has_experts(layer.index):
        return mixture_of_experts(g, x, name, size, config.moe, shared_bias=bias)
    return gated_mlp(g, x, name, (size, config.intermediate_size), bias=bias)
