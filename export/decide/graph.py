"""`decide.onnx`: what a step's logits come to, as a graph of its own that runs after the target's.

It holds no weights. N rows of logits, R requests, M places of a request's draft (the text's end and
each node), V vocabulary, P tokens whose logits options change, S of a proposal; all at least 1.

| input | shape | what it is; "none" is |
|---|---|---|
| logits | fp32 [N, V] | the target's, as they are |
| temperature | fp32 [N] | above 0; a greedy row has 1, and `top_p` 0 |
| top_k | int64 [N] | at most 1024; none: more |
| top_p | fp32 [N] | none: 1; 0 keeps the likeliest token alone |
| min_p | fp32 [N] | none: 0 |
| adjusted_ids | int64 [N, P] | tokens whose logits change; none: any, changed by nothing |
| adjusted_bias | fp32 [N, P] | is added first, -inf rules the token out; none: 0 |
| adjusted_repetition | fp32 [N, P] | then divides what is positive, multiplies the rest; none: 1 |
| adjusted_penalty | fp32 [N, P] | is taken away last; none: 0 |
| block_times | fp32 [N, V / 64 rounded up] | exponential random numbers, for a block of ids |
| token_times | fp32 [N, 64] | the same, for a token of that block |
| proposed_id | int64 [N] | the drafted token after this row, where it was drawn at random |
| proposed_prob | fp32 [N] | what it was drawn with; none: 0 |
| accept_uniform | fp32 [N] | in [0, 1): decides whether it stays |
| proposal_ids | int64 [N, S] | the tokens that it was drawn from; none: any, of probability 0 |
| proposal_probs | fp32 [N, S] | their probabilities |
| node_rows | int64 [R, M] | the row of logits after each place |
| node_ids | int64 [R, M] | the drafted token; -1 for the text and for places without a node |
| node_parents | int64 [R, M] | the place before it; 0, the text, has itself |
| ancestors | bool [R, M, M] | [r, i, j]: place j is i or above it, and is not the text |

A row with fewer tokens than P or S names its first one again, with the same numbers.

| output | shape | what it is |
|---|---|---|
| is_decided | bool [R] | False: NaN, no token left, or a `top_p` that takes over 1024 tokens |
| num_accepted | int64 [R] | drafted tokens that stay |
| path | int64 [R, M] | the places of the walk: 0, then the accepted nodes, then -1 |
| token_ids | int64 [R, M] | the token after each of them, then -1 |
| logprobs | fp32 [R, M] | its log-probability by `logits`, then 0 |
"""

import onnx_ir as ir

from specexport.export.decide.draw import choose
from specexport.export.decide.options import Inputs, adjust, keep, total
from specexport.export.decide.walk import walk
from specexport.export.graph_io import DecoderGraph, close_graph, graph_input, graph_output
from specexport.export.layers import GraphBuilder
from specexport.export.manifest import RACE_BLOCK

_FLOAT, _INT, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL
_ROWS, _TREE = ("positions",), ("requests", "places")


def build_decide(vocab_size: int) -> DecoderGraph:
    """The graph for logits of `vocab_size` tokens."""
    g, inputs = GraphBuilder("fp32"), _inputs(vocab_size)
    logits = inputs["logits"]
    weights, is_right = keep(g, adjust(g, logits, inputs), inputs, vocab_size)
    token_ids, is_possible = choose(g, weights, inputs, vocab_size)
    logprobs, is_finite = _logprobs(g, logits, token_ids)
    is_good = g.op("And", g.op("And", is_right, is_possible), is_finite)
    found = walk(g, token_ids, logprobs, is_good, inputs)
    outputs = [
        graph_output(found["is_decided"], "is_decided", "requests", dtype=_BOOL),
        graph_output(found["num_accepted"], "num_accepted", "requests", dtype=_INT),
        graph_output(found["path"], "path", *_TREE, dtype=_INT),
        graph_output(found["token_ids"], "token_ids", *_TREE, dtype=_INT),
        graph_output(found["logprobs"], "logprobs", *_TREE),
    ]
    return close_graph(g, inputs.values(), outputs)


def _inputs(vocab_size: int) -> Inputs:
    adjusted, proposal = (*_ROWS, "adjusted"), (*_ROWS, "proposals")
    shapes: dict[str, tuple[ir.DataType, tuple[str | int, ...]]] = {
        "logits": (_FLOAT, (*_ROWS, vocab_size)),
        "temperature": (_FLOAT, _ROWS),
        "top_k": (_INT, _ROWS),
        "top_p": (_FLOAT, _ROWS),
        "min_p": (_FLOAT, _ROWS),
        "adjusted_ids": (_INT, adjusted),
        "adjusted_bias": (_FLOAT, adjusted),
        "adjusted_repetition": (_FLOAT, adjusted),
        "adjusted_penalty": (_FLOAT, adjusted),
        "block_times": (_FLOAT, (*_ROWS, -(-vocab_size // RACE_BLOCK))),
        "token_times": (_FLOAT, (*_ROWS, RACE_BLOCK)),
        "proposed_id": (_INT, _ROWS),
        "proposed_prob": (_FLOAT, _ROWS),
        "accept_uniform": (_FLOAT, _ROWS),
        "proposal_ids": (_INT, proposal),
        "proposal_probs": (_FLOAT, proposal),
        "node_rows": (_INT, _TREE),
        "node_ids": (_INT, _TREE),
        "node_parents": (_INT, _TREE),
        "ancestors": (_BOOL, (*_TREE, "places")),
    }
    return {name: graph_input(name, dtype, *shape) for name, (dtype, shape) in shapes.items()}


def _logprobs(g: GraphBuilder, logits: ir.Value, token_ids: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Of the tokens [N, 1] by the model's own distribution; whether that has no NaN [N, 1]."""
    best = g.op("ReduceMax", logits, g.ints(1), keepdims=1)
    whole = total(g, g.op("Exp", g.op("Sub", logits, best)))
    own = g.op("Sub", g.op("GatherElements", logits, token_ids, axis=1), best)
    is_finite = g.op("Greater", whole, g.scalar(0.0))
    return g.op("Sub", own, g.op("Log", whole)), is_finite
