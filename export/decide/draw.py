"""A token for each row of weights: the drafted one, or the winner of a race (`runtime/race.py`).

A token drawn from q stays with probability min(1, p / q); else max(p - q, 0) is drawn from. Where
nothing was drawn q is 0, so that the same draw is one from the target's own distribution.
"""

import onnx_ir as ir

from specexport.export.decide.options import Inputs, column, total
from specexport.export.layers import GraphBuilder
from specexport.export.manifest import RACE_BLOCK


def choose(
    g: GraphBuilder, weights: ir.Value, inputs: Inputs, vocab_size: int
) -> tuple[ir.Value, ir.Value]:
    """The token after each row of [N, V], and whether there is one: both [N, 1]."""
    whole, ids = total(g, weights), inputs["proposal_ids"]
    proposed = column(g, inputs["proposed_id"])
    own = g.op("GatherElements", weights, proposed, axis=1)
    prob = column(g, inputs["proposed_prob"])
    chance = g.op("Mul", g.op("Mul", column(g, inputs["accept_uniform"]), prob), whole)
    is_proposed = g.op("Greater", prob, g.scalar(0.0))
    is_accepted = g.op("And", is_proposed, g.op("Less", chance, own))
    found = g.op("GatherElements", weights, ids, axis=1)  # [N, S]
    left = g.op("Sub", found, g.op("Mul", inputs["proposal_probs"], whole))
    left = g.op("Max", left, g.scalar(0.0))
    residual = g.op("ScatterElements", weights, ids, left, axis=1)
    drawn, is_possible = _race(g, residual, inputs, vocab_size)
    token_ids = g.op("Where", is_accepted, proposed, drawn)
    return token_ids, g.op("Or", is_accepted, is_possible)


def _race(
    g: GraphBuilder, weights: ir.Value, inputs: Inputs, vocab_size: int
) -> tuple[ir.Value, ir.Value]:
    """Blocks of ids race, then the tokens of the block that won: winner and whether any ran."""
    num_blocks = -(-vocab_size // RACE_BLOCK)
    padded = g.op("Pad", weights, g.ints(0, 0, 0, num_blocks * RACE_BLOCK - vocab_size))
    blocks = g.op("Reshape", padded, g.ints(0, num_blocks, RACE_BLOCK))  # [N, blocks, 64]
    masses = g.op("ReduceSum", blocks, g.ints(2), keepdims=0)
    block = _first(g, masses, inputs["block_times"])
    index = g.op("Expand", g.op("Unsqueeze", block, g.ints(2)), g.ints(1, 1, RACE_BLOCK))
    inside = g.op("GatherElements", blocks, index, axis=1)  # [N, 1, 64]
    offset = _first(g, g.op("Squeeze", inside, g.ints(1)), inputs["token_times"])
    token_ids = g.op("Add", g.op("Mul", block, g.ints(RACE_BLOCK)), offset)
    return token_ids, g.op("Greater", total(g, masses), g.scalar(0.0))


def _first(g: GraphBuilder, rates: ir.Value, times: ir.Value) -> ir.Value:
    """Index of the one that finishes first, at its time over its rate: [N, n] -> [N, 1]."""
    return g.op("ArgMax", g.op("Div", rates, times), axis=1, keepdims=1)
