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
from specexport.export.manifest import FINAL_NORM, Tap, WeightType

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def build_decoder(
    config: DecoderConfig, weight_type: WeightType, max_length: int, taps: Sequence[Tap] = ()
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
        hidden, present = _layer(g, config, f"model.layers.{i}", hidden, step, past)
        streams[i] = hidden
        presents.append(present)
    hidden = rms_norm(g, hidden, "model.norm", config.hidden_size, config.norm_eps)
    streams[FINAL_NORM] = hidden
    weight = g.matrix(EMBEDDING if config.tied_embeddings else LM_HEAD, *vocabulary)
    logits = lm_head(g, wanted_rows(g, hidden, config.hidden_size, logits_indices), weight)

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
        *(value for pair in pasts for value in pair),
    ]
    return close_graph(g, inputs, [*outputs, *cache_outputs(config, presents)])


def _layer(
    g: GraphBuilder,
    config: DecoderConfig,
    name: str,
    x: ir.Value,
    step: StepValues,
    past: CachePair,
) -> tuple[ir.Value, CachePair]:
    """`h = x + attention(norm(x))`, then `h + mlp(norm(h))`."""
    size, eps = config.hidden_size, config.norm_eps
    shape = attention_shape(config)
    normed = rms_norm(g, x, f"{name}.input_layernorm", size, eps)
    attended, present = attention(g, normed, f"{name}.self_attn", shape, step, past)
    h = g.op("Add", x, attended)
    normed = rms_norm(g, h, f"{name}.post_attention_layernorm", size, eps)
    sizes = (size, config.intermediate_size)
    return g.op("Add", h, gated_mlp(g, normed, f"{name}.mlp", sizes, bias=config.mlp_bias)), present


def attention_shape(config: DecoderConfig, input_size: int | None = None) -> AttentionShape:
    """The attention of `config`; its input is `input_size` wide, or as wide as its output."""
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
        input_size=input_size,
    )
