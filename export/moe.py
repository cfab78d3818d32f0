"""Mixtures of experts: routing as each family does it, and the chosen experts' work alone.

The N·k assignments (token, expert) are put in order of their experts by counting, not sorting, so
each expert multiplies one contiguous block of rows: exactly the rows that chose it, none for most
experts when decoding. Every expert keeps its own matrices, read in place.

Cost on ONNX Runtime, one thread of a Zen 4, fp32, 64 experts, 8 a token, H 512, I 256: about 0.5 ms
for 1 token, 3 ms for 5, 21 ms for 256; an expert that nobody chose costs its three empty products,
about 3 µs. The alternatives, measured the same way:

- all experts for all tokens: 20 times as long for 1 token, 8 times for 256;
- gathering a copy of the matrices for every assignment: up to 2, 5 and (32 tokens) 10 times;
- an `If` around each expert, over all tokens: equal when decoding, 6 times for 256 tokens;
- an `If` around each expert, over its own rows: equal, with more overhead an expert.

The blocks' sizes depend on data. TensorRT-RTX builds it so (docs/gpu.md); how fast it runs there is
not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from specexport.export.config import MoeConfig
from specexport.export.layers import GraphBuilder, gated, gated_mlp

_ROUTER_SUFFIXES = (".mlp.gate.weight", ".e_score_correction_bias")


def is_router(name: str) -> bool:
    """Whether a tensor decides which experts a token gets; such are never rounded."""
    return name.endswith(_ROUTER_SUFFIXES)


def mixture_of_experts(
    g: GraphBuilder,
    x: ir.Value,  # [B, Q, H]
    name: str,
    hidden_size: int,
    moe: MoeConfig,
    *,
    shared_bias: bool,
) -> ir.Value:
    """The weighted sum of each token's experts, plus the shared experts: [B, Q, H] -> [B, Q, H]."""
    tokens = g.op("Reshape", x, g.ints(-1, hidden_size))
    routing = route(g, tokens, name, hidden_size, moe)
    y = _experts(g, tokens, f"{name}.experts", hidden_size, moe, routing)
    y = g.op("Reshape", y, g.op("Shape", x))
    if not moe.shared_intermediate_size:
        return y
    sizes = (hidden_size, moe.shared_intermediate_size)
    return g.op("Add", y, gated_mlp(g, x, f"{name}.shared_experts", sizes, bias=shared_bias))


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token's experts and their weights."""

    expert_ids: ir.Value  # [N, k] int64
    weights: ir.Value  # [N, k]


def route(
    g: GraphBuilder, tokens: ir.Value, name: str, hidden_size: int, moe: MoeConfig
) -> Routing:
    """Choose the experts of each of the N tokens, [N, H]."""
    gate = g.exact(f"{name}.gate.weight", moe.num_experts, hidden_size, transpose=True)
    logits = g.op("MatMul", tokens, gate)
    softmax = moe.scoring == "softmax"
    scores = g.op("Softmax", logits, axis=-1) if softmax else g.op("Sigmoid", logits)
    choice = scores
    if moe.choice_bias is not None:
        choice = g.op("Add", scores, g.exact(f"{name}.{moe.choice_bias}", *moe.choice_bias_shape))
    if moe.top_groups < moe.num_groups:
        choice = _limit_groups(g, choice, moe)
    _, expert_ids = g.ops("TopK", 2, choice, g.ints(moe.experts_per_token), axis=-1)
    weights = g.op("GatherElements", scores, expert_ids, axis=-1)
    if moe.normalize:
        total = g.op("ReduceSum", weights, g.ints(-1), keepdims=1)
        if moe.norm_floor:
            total = g.op("Max", total, g.scalar(moe.norm_floor))
        weights = g.op("Div", weights, total)
    if moe.scaling != 1.0:
        weights = g.op("Mul", weights, g.scalar(moe.scaling))
    return Routing(expert_ids, weights)


def _limit_groups(g: GraphBuilder, choice: ir.Value, moe: MoeConfig) -> ir.Value:
    """-inf for all experts outside the best groups; a group counts by its two best: [N, E]."""
    group_size = moe.num_experts // moe.num_groups
    grouped = g.op("Reshape", choice, g.ints(-1, moe.num_groups, group_size))
    best, _ = g.ops("TopK", 2, grouped, g.ints(2), axis=-1)
    group_scores = g.op("ReduceSum", best, g.ints(-1), keepdims=0)  # [N, G]
    _, groups = g.ops("TopK", 2, group_scores, g.ints(moe.top_groups), axis=-1)
    out = g.op("Expand", g.scalar(float("-inf")), g.op("Shape", group_scores))
    kept = g.op("Expand", g.scalar(0.0), g.op("Shape", groups))
    barrier = g.op("ScatterElements", out, groups, kept, axis=-1)  # [N, G]: 0 or -inf
    limited = g.op("Add", grouped, g.op("Unsqueeze", barrier, g.ints(-1)))
    return g.op("Reshape", limited, g.ints(-1, moe.num_experts))


def _experts(
    g: GraphBuilder,
    tokens: ir.Value,  # [N, H]
    name: str,
    hidden_size: int,
    moe: MoeConfig,
    routing: Routing,
) -> ir.Value:
    """The weighted sum of the chosen experts' outputs: [N, H]."""
    counts, places, token_ids = _group_by_expert(g, routing.expert_ids, moe)
    rows = g.op("Gather", tokens, token_ids, axis=0)  # [N * k, H], by expert
    up_sizes = (hidden_size, moe.intermediate_size)
    blocks = g.ops("Split", moe.num_experts, rows, counts, axis=0)
    gate = _each_expert(g, blocks, name, "gate_proj", up_sizes)
    up = _each_expert(g, blocks, name, "up_proj", up_sizes)
    blocks = g.ops("Split", moe.num_experts, gated(g, gate, up), counts, axis=0)
    down = _each_expert(g, blocks, name, "down_proj", up_sizes[::-1])
    chosen = g.op("Gather", down, places, axis=0)  # [N, k, H]
    total = g.op("MatMul", g.op("Unsqueeze", routing.weights, g.ints(1)), chosen)
    return g.op("Squeeze", total, g.ints(1))


def _each_expert(
    g: GraphBuilder, blocks: Sequence[ir.Value], name: str, part: str, sizes: tuple[int, int]
) -> ir.Value:
    """Expert e's matrix times its block of rows, all joined again: -> [N * k, O]."""
    size_in, size_out = sizes
    products = []
    for expert, block in enumerate(blocks):
        source = f"{name}.{expert}.{part}.weight"
        matrix = g.to_fp32(g.matrix(source, size_out, size_in, transpose=True))
        products.append(g.op("MatMul", block, matrix))
    return g.op("Concat", *products, axis=0)


def _group_by_expert(
    g: GraphBuilder, expert_ids: ir.Value, moe: MoeConfig
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Order the assignments by expert, tokens in order within one.

    Rows of each expert [E]; the place of each assignment in that order [N, k]; the token at each
    place [N * k].
    """
    num_tokens = g.op("Shape", expert_ids, start=0, end=1)
    each = g.op("Concat", num_tokens, g.ints(moe.num_experts), axis=0)
    ones = g.op("Expand", g.ints(1), g.op("Shape", expert_ids))
    chosen = g.op("ScatterElements", g.op("Expand", g.ints(0), each), expert_ids, ones, axis=-1)
    counts = g.op("ReduceSum", chosen, g.ints(0), keepdims=0)
    starts = g.op("CumSum", counts, g.scalar(0), exclusive=1)
    ranks = g.op("CumSum", chosen, g.scalar(0), exclusive=1)  # [N, E]: earlier tokens of an expert
    places = g.op("GatherElements", g.op("Add", ranks, starts), expert_ids, axis=-1)
    nth = g.op("Sub", g.op("CumSum", ones, g.scalar(0)), ones)  # [N, k]: the token's own number
    flat = g.ints(-1)
    places_flat, nth_flat = g.op("Reshape", places, flat), g.op("Reshape", nth, flat)
    token_ids = g.op("ScatterElements", nth_flat, places_flat, nth_flat, axis=0)
    return counts, places, token_ids
