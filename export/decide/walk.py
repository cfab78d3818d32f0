"""Down the tree of a draft, from the tokens that were chosen after each of its places.

A node stays where it is the token that was chosen after its parent, and all above it stay.
"""

import onnx_ir as ir

from specexport.export.decide.options import Inputs
from specexport.export.layers import GraphBuilder

Outputs = dict[str, ir.Value]


def walk(
    g: GraphBuilder, token_ids: ir.Value, logprobs: ir.Value, is_good: ir.Value, inputs: Inputs
) -> Outputs:
    """The graph's outputs; what is given of each row is [N, 1]."""
    rows = inputs["node_rows"]  # [R, M]
    chosen, logprobs, is_good = (_at(g, x, rows) for x in (token_ids, logprobs, is_good))
    stays = _accepted(g, chosen, inputs)
    path = _path(g, stays, inputs["ancestors"])
    is_visited = g.op("GreaterOrEqual", path, g.ints(0))
    place = g.op("Max", path, g.ints(0))
    tokens = g.op("GatherElements", chosen, place, axis=1)
    found = g.op("GatherElements", logprobs, place, axis=1)
    is_bad = g.op("And", stays, g.op("Not", is_good))
    num_stay = g.op("ReduceSum", _number(g, stays), g.ints(1), keepdims=0)
    return {
        "is_decided": g.op("Not", _any(g, is_bad, 1)),
        "num_accepted": g.op("Sub", num_stay, g.ints(1)),
        "path": path,
        "token_ids": g.op("Where", is_visited, tokens, g.ints(-1)),
        "logprobs": g.op("Where", is_visited, found, g.scalar(0.0)),
    }


def _accepted(g: GraphBuilder, chosen: ir.Value, inputs: Inputs) -> ir.Value:
    """Whether each place stays; the text, which has nothing above it, always does: [R, M]."""
    parents = g.op("GatherElements", chosen, inputs["node_parents"], axis=1)
    misses = g.op("Not", g.op("Equal", parents, inputs["node_ids"]))
    above = g.op("And", inputs["ancestors"], g.op("Unsqueeze", misses, g.ints(1)))  # [R, M, M]
    return g.op("Not", _any(g, above, 2))


def _path(g: GraphBuilder, stays: ir.Value, ancestors: ir.Value) -> ir.Value:
    """At each depth the place that stays, or -1: [R, M]."""
    num_places = g.op("Squeeze", g.op("Shape", stays, start=1, end=2), g.ints(0))
    places = g.op("Range", g.scalar(0), num_places, g.scalar(1))  # [M]
    depths = g.op("ReduceSum", _number(g, ancestors), g.ints(2), keepdims=0)  # [R, M]
    depths = g.op("Where", stays, depths, g.ints(-1))
    is_there = g.op(
        "Equal", g.op("Unsqueeze", depths, g.ints(1)), g.op("Unsqueeze", places, g.ints(1))
    )
    found = g.op("Where", is_there, places, g.ints(-1))  # [R, depth, place]
    return g.op("ReduceMax", found, g.ints(2), keepdims=0)


def _at(g: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """[N, 1] at the rows of each place: [R, M]."""
    return g.op("Gather", g.op("Squeeze", x, g.ints(1)), rows, axis=0)


def _any(g: GraphBuilder, x: ir.Value, axis: int) -> ir.Value:
    """Whether one along the axis is true."""
    return g.op(
        "Cast", g.op("ReduceMax", _number(g, x), g.ints(axis), keepdims=0), to=ir.DataType.BOOL
    )


def _number(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op("Cast", x, to=ir.DataType.INT64)
