"""What a request's options make of logits: adjusted first, then weights that sum to anything.

Top-k and top-p look at the likeliest `MOST_CANDIDATES` tokens alone, best first, equals by id; a
row that needs more of them says so.
"""

from collections.abc import Mapping

import onnx_ir as ir

from specexport.export.layers import GraphBuilder
from specexport.export.manifest import MOST_CANDIDATES

Inputs = Mapping[str, ir.Value]
INFINITY = float("inf")
_TINY = 1e-30


def column(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """[N] -> [N, 1]."""
    return g.op("Unsqueeze", x, g.ints(1))


def masked(g: GraphBuilder, keeps: ir.Value, x: ir.Value) -> ir.Value:
    """`x` where it is kept, elsewhere 0."""
    return g.op("Where", keeps, x, g.scalar(0.0))


def total(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """Sum of each row: [N, n] -> [N, 1]."""
    return g.op("ReduceSum", x, g.ints(1), keepdims=1)


def adjust(g: GraphBuilder, logits: ir.Value, inputs: Inputs) -> ir.Value:  # [N, V]
    """Bias, then repetition (CTRL, arXiv 1909.05858, section 4.1), then penalty of some tokens."""
    ids, repetition = inputs["adjusted_ids"], inputs["adjusted_repetition"]
    found = g.op("GatherElements", logits, ids, axis=1)  # [N, P]
    found = g.op("Add", found, inputs["adjusted_bias"])
    is_negative = g.op("Less", found, g.scalar(0.0))
    weaker = (g.op(op_type, found, repetition) for op_type in ("Mul", "Div"))
    found = g.op("Sub", g.op("Where", is_negative, *weaker), inputs["adjusted_penalty"])
    return g.op("ScatterElements", logits, ids, found, axis=1)


def keep(
    g: GraphBuilder, scores: ir.Value, inputs: Inputs, vocab_size: int
) -> tuple[ir.Value, ir.Value]:
    """Weights [N, V], 0 for what top-k, top-p and min-p rule out; whether they are right [N, 1]."""
    num_candidates = min(MOST_CANDIDATES, vocab_size)
    best, ids = g.ops("TopK", 2, scores, g.ints(num_candidates), axis=1)  # [N, C], best first
    first = g.op("Slice", best, g.ints(0), g.ints(1), g.ints(1))  # [N, 1]
    weights = g.op("Sub", scores, first)
    weights = g.op("Exp", g.op("Div", weights, column(g, inputs["temperature"])))
    limit = _kth(g, best, inputs["top_k"], num_candidates)
    weights = masked(g, g.op("GreaterOrEqual", scores, limit), weights)
    mass = _mass(g, weights, inputs["top_p"])
    weights, is_right = _top_p(g, scores, weights, (best, ids), mass)
    is_likely = g.op("GreaterOrEqual", weights, column(g, inputs["min_p"]))  # the first weighs 1
    return masked(g, is_likely, weights), is_right


def _kth(g: GraphBuilder, best: ir.Value, top_k: ir.Value, num_candidates: int) -> ir.Value:
    """The k-th largest score, -inf where there is no limit: [N, C] -> [N, 1]."""
    top_k = column(g, top_k)
    index = g.op("Sub", g.op("Min", top_k, g.ints(num_candidates)), g.ints(1))
    found = g.op("GatherElements", best, index, axis=1)
    is_limited = g.op("LessOrEqual", top_k, g.ints(num_candidates))
    return g.op("Where", is_limited, found, g.scalar(-INFINITY))


def _mass(g: GraphBuilder, weights: ir.Value, top_p: ir.Value) -> ir.Value:
    """What the kept weights must reach, infinity where there is no limit: [N, V] -> [N, 1]."""
    top_p = column(g, top_p)
    mass = g.op("Mul", top_p, total(g, weights))
    mass = g.op("Max", mass, g.scalar(_TINY))  # the first is always kept
    return g.op("Where", g.op("Less", top_p, g.scalar(1.0)), mass, g.scalar(INFINITY))


def _top_p(
    g: GraphBuilder,
    scores: ir.Value,  # [N, V]
    weights: ir.Value,  # [N, V]
    candidates: tuple[ir.Value, ir.Value],  # scores and ids, [N, C]
    mass: ir.Value,  # [N, 1]
) -> tuple[ir.Value, ir.Value]:
    """The fewest that reach the mass, best first; whether the candidates do [N, 1].

    Of equal scores some may be kept: so all above the last one are, and then those that are.
    """
    best, ids = candidates
    found = g.op("GatherElements", weights, ids, axis=1)  # [N, C]
    before = g.op("CumSum", found, g.scalar(1), exclusive=1)
    is_leading = g.op("Less", before, mass)
    last = g.op("Where", is_leading, best, g.scalar(INFINITY))
    last = g.op("ReduceMin", last, g.ints(1), keepdims=1)
    is_unlimited = g.op("Equal", mass, g.scalar(INFINITY))
    last = g.op("Where", is_unlimited, g.scalar(-INFINITY), last)
    kept = masked(g, g.op("Greater", scores, last), weights)
    kept = g.op("ScatterElements", kept, ids, masked(g, is_leading, found), axis=1)
    return kept, g.op("Or", is_unlimited, g.op("GreaterOrEqual", total(g, found), mass))
