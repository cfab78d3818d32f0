"""What the graphs of all step heads (EAGLE, MTP) share; the equation between is the head's own.

| input | shape | |
|---|---|---|
| input_ids, position_ids | [B, Q] int64 | |
| hidden_states | [B, Q, H] fp32 | the target's features, or this head's own recycled ones |
| write_indices | [B] int64 | where each row's new cache entries go |
| attention_mask | [B, 1, Q, T] bool | true = may look; T is the longest valid length |
| logits_indices | [N] int64 | which of the B*Q flattened rows get logits |
| past_key_values.{i}.key, .value | [B, Hkv, S, D] fp32 | the head's own cache, one entry a row |

| output | shape | |
|---|---|---|
| logits | [N, V_draft] fp32 | |
| recycled_states | [N, H] fp32 | hidden_states of the next step, of the same rows as the logits |
| present.{i}.key, .value | [B, Hkv, S, D] fp32 | |

(The two cannot share one name: a value of an ONNX graph has a name of its own.)
Query i pairs the token t[i+1] with the hidden state h[i] at position i; its logits predict t[i+2].

A head calls `step_inputs`, computes its stream [B, Q, H] from them, picks the wanted rows and hands
all that comes out to `close_step_graph`.
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
from specexport.export.layers import GraphBuilder, StepValues


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The graph inputs of a step head."""

    input_ids: ir.Value  # [B, Q]
    hidden_states: ir.Value  # [B, Q, H]
    logits_indices: ir.Value  # [N]
    step: StepValues
    pasts: list[CachePair]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step head computes."""

    logits: ir.Value  # [N, V_draft]
    recycled: ir.Value  # [N, H]
    presents: Sequence[CachePair]


def step_inputs(g: GraphBuilder, config: DecoderConfig, max_length: int) -> StepInputs:
    """New graph inputs for a head of `config`, with rotary tables for `max_length` positions."""
    return StepInputs(
        input_ids=graph_input("input_ids", ir.DataType.INT64, "batch", "query"),
        hidden_states=graph_input(
            "hidden_states", ir.DataType.FLOAT, "batch", "query", config.hidden_size
        ),
        logits_indices=graph_input("logits_indices", ir.DataType.INT64, "num_logits"),
        step=step_values(g, config, max_length),
        pasts=cache_inputs(config),
    )


def close_step_graph(
    g: GraphBuilder, config: DecoderConfig, inputs: StepInputs, computed: StepOutputs
) -> DecoderGraph:
    """The finished graph; `config.vocab_size` is V_draft."""
    step = inputs.step
    return close_graph(
        g,
        [
            inputs.input_ids,
            step.position_ids,
            inputs.hidden_states,
            step.write_indices,
            step.attention_mask,
            inputs.logits_indices,
            *(value for pair in inputs.pasts for value in pair),
        ],
        [
            graph_output(computed.logits, "logits", "num_logits", config.vocab_size),
            graph_output(computed.recycled, "recycled_states", "num_logits", config.hidden_size),
            *cache_outputs(config, computed.presents),
        ],
    )
