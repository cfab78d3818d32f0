"""The decoder layers of an EAGLE head: those of a target, but for what the first one reads."""

from dataclasses import dataclass, replace

import onnx_ir as ir

from specexport.export.config import DecoderConfig
from specexport.export.decoder import attention_layer
from specexport.export.graph_io import CachePair
from specexport.export.heads.step_graph import StepInputs
from specexport.export.layers import GraphBuilder, StepValues, gated_mlp, rms_norm


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer adds to, and what its attention reads."""

    residual: ir.Value  # [B, Q, H]
    attended: ir.Value  # [B, Q, width]
    width: int


def eagle_layers(
    g: GraphBuilder, config: DecoderConfig, first: LayerInput, inputs: StepInputs
) -> tuple[ir.Value, list[CachePair]]:
    """The layers' output [B, Q, H] and their caches; all but the first have an input norm."""
    size, presents = config.hidden_size, []
    layer_input = first
    for i, past in enumerate(inputs.pasts):
        x, present = _layer(g, config, f"layers.{i}", layer_input, inputs.step, past)
        presents.append(present)
        if i + 1 < config.num_layers:
            normed = rms_norm(g, x, f"layers.{i + 1}.input_layernorm", size, config.norm_eps)
            layer_input = LayerInput(x, normed, size)
    return x, presents


def _layer(
    g: GraphBuilder,
    config: DecoderConfig,
    name: str,
    x: LayerInput,
    step: StepValues,
    past: CachePair,
) -> tuple[ir.Value, CachePair]:
    """`h = residual + attention(attended)`, then `h + mlp(norm(h))`."""
    size = config.hidden_size
    wide = replace(config, attention_input_size=x.width)
    attended, present = attention_layer(g, wide, x.attended, f"{name}.self_attn", step, past)
    h = g.op("Add", x.residual, attended)
    normed = rms_norm(g, h, f"{name}.post_attention_layernorm", size, config.norm_eps)
    sizes = (size, config.intermediate_size)
    return g.op("Add", h, gated_mlp(g, normed, f"{name}.mlp", sizes, bias=config.mlp_bias)), present
