"""Medusa heads (arXiv 2401.10774): head i predicts, from one hidden state, the token i + 2 ahead.

Three layouts are read, all of the same equation: FasterDecoding's `{head}.{layer}.linear` with
`{head}.{num_layers}` as the output matrix, ModelOpt's, which puts `medusa_heads.` before that, and
vLLM's `blocks.{head}.layers.{layer}` with `lm_heads.{head}` and an optional `token_map`. Heads and
layers are counted from the names: published configs are often wrong about them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from specexport.errors import CheckpointError
from specexport.export.config import DecoderConfig
from specexport.export.config_values import Strict, check_values
from specexport.export.graph_io import DecoderGraph, close_graph, graph_input, graph_output
from specexport.export.heads.check import check_head_tensors
from specexport.export.heads.head_checkpoint import HeadCheckpoint
from specexport.export.heads.plan import (
    HeadGraphs,
    HeadPlan,
    RenamedTensors,
    renamed_once,
)
from specexport.export.heads.token_map import TokenMap, check_token_map
from specexport.export.heads.vocabulary_weights import target_lm_head
from specexport.export.layers import GraphBuilder, linear, lm_head, silu
from specexport.export.manifest import FINAL_NORM, FloatType

_PREFIX = re.compile(r"^medusa_heads?\.")
_HEAD, _BLOCK = r"(?P<head>0|[1-9][0-9]{0,8})", r"(?P<block>0|[1-9][0-9]{0,8})"
_BLOCKS = (
    re.compile(rf"{_HEAD}\.{_BLOCK}\.linear\.(?P<kind>weight|bias)"),
    re.compile(rf"blocks\.{_HEAD}\.layers\.{_BLOCK}\.(?P<kind>weight|bias)"),
)
_OUTPUTS = (
    re.compile(rf"{_HEAD}\.{_BLOCK}\.weight"),
    re.compile(rf"lm_heads\.{_HEAD}\.weight"),
)


class _Values(Strict):
    original_lm_head: bool | None = None


@dataclass(frozen=True, slots=True)
class _Medusa:
    """All heads: their sizes, and which output matrix each of them uses."""

    layout: str
    tensors: RenamedTensors
    target: DecoderConfig
    num_blocks: int
    has_bias: bool
    vocab_size: int
    outputs: tuple[str | None, ...]
    """By head: its output matrix; None: the target's."""

    def build(self, lender: GraphBuilder, weight_type: FloatType, _: int) -> HeadGraphs:
        """The one graph; raises `CheckpointError` where the file does not fit it."""
        graphs = HeadGraphs(medusa=self._graph(GraphBuilder(weight_type, lender)))
        check_head_tensors(self.layout, self.tensors, graphs)
        return graphs

    def _graph(self, g: GraphBuilder) -> DecoderGraph:
        """hidden_states [B, H] → logits [B, heads, V]."""
        hidden = graph_input("hidden_states", ir.DataType.FLOAT, "batch", self.target.hidden_size)
        states = [self._state(g, hidden, head) for head in range(len(self.outputs))]
        shape = ("batch", len(self.outputs), self.vocab_size)
        logits = graph_output(self._logits(g, states), "logits", *shape)
        return close_graph(g, [hidden], [logits])

    def _state(self, g: GraphBuilder, x: ir.Value, head: int) -> ir.Value:  # [B, H] -> [B, 1, H]
        """`x + silu(W x + b)` in each block."""
        size = self.target.hidden_size
        for block in range(self.num_blocks):
            y = linear(g, x, _block(head, block), (size, size), bias=self.has_bias)
            x = g.op("Add", x, silu(g, y))
        return g.op("Unsqueeze", x, g.ints(1))

    def _logits(self, g: GraphBuilder, states: list[ir.Value]) -> ir.Value:  # -> [B, heads, V]
        """All states by one product where the heads share an output matrix."""
        if len(set(self.outputs)) == 1:
            matrix, width = self._output(g, self.outputs[0]), len(states)
            rows = g.op(
                "Reshape", g.op("Concat", *states, axis=1), g.ints(-1, self.target.hidden_size)
            )
            return g.op("Reshape", lm_head(g, rows, matrix), g.ints(-1, width, self.vocab_size))
        logits = [
            lm_head(g, g.op("Squeeze", state, g.ints(1)), self._output(g, output))
            for state, output in zip(states, self.outputs, strict=True)
        ]
        return g.op("Concat", *(g.op("Unsqueeze", x, g.ints(1)) for x in logits), axis=1)

    def _output(self, g: GraphBuilder, name: str | None) -> ir.Value:  # [V, H]
        if name is None:
            return target_lm_head(g, self.target)
        return g.matrix(name, self.vocab_size, self.target.hidden_size)


def plan_medusa(head: HeadCheckpoint, target: DecoderConfig) -> HeadPlan:
    """Recognise Medusa heads of `target`; raises `CheckpointError` naming what does not fit."""
    files = renamed_once(head.source, head.names(), lambda name: _PREFIX.sub("", name))
    token_map_file = files.pop("token_map", None)
    blocks = [match for name in files if (match := _match(_BLOCKS, name))]
    if not blocks:
        raise CheckpointError(
            f"{head.source} holds no Medusa heads (tensors such as '0.0.linear.weight' or "
            f"'blocks.0.layers.0.weight'); its first is {min(files, default='none')!r}. Choose "
            "another --method."
        )
    num_heads, num_blocks = _counts(head.source, blocks)
    tensors = _renamed(head, files, num_blocks)
    outputs = _outputs(head, tensors, num_heads)
    output = outputs[0]  # where the first is not stored, the check of all tensors will say so
    rows = tensors.matrix_shape(output)[0] if output in tensors.renamed else target.vocab_size
    token_map, notes = _token_map(head, token_map_file, rows, target.vocab_size)
    layout = f"Medusa, {_producer(head)}"
    medusa = _Medusa(
        layout=layout,
        tensors=tensors,
        target=target,
        num_blocks=num_blocks,
        has_bias=any(match["kind"] == "bias" for match in blocks),
        vocab_size=rows,
        outputs=outputs,
    )
    return HeadPlan(layout, (FINAL_NORM,), tensors, medusa.build, token_map, notes)


def _match(patterns: Sequence[re.Pattern[str]], name: str) -> re.Match[str] | None:
    return next((match for p in patterns if (match := p.fullmatch(name))), None)


def _counts(source: str, blocks: Sequence[re.Match[str]]) -> tuple[int, int]:
    """Heads, and blocks of each; raises `CheckpointError` for a gap in their numbers."""
    found = {(int(match["head"]), int(match["block"])) for match in blocks}
    num_heads, num_blocks = (max(numbers) + 1 for numbers in zip(*found, strict=True))
    needed = ((head, block) for head in range(num_heads) for block in range(num_blocks))
    # Looks at no more than are there and one, whatever the numbers are.
    if missing := next((pair for pair in needed if pair not in found), None):
        raise CheckpointError(
            f"{source} holds Medusa heads up to number {num_heads - 1} with blocks up to number "
            f"{num_blocks - 1}, but no block {missing[1]} of head {missing[0]}. Is the file "
            "complete?"
        )
    return num_heads, num_blocks


def _renamed(head: HeadCheckpoint, files: Mapping[str, str], num_blocks: int) -> RenamedTensors:
    names = renamed_once(head.source, files, lambda name: _rename(name, num_blocks))
    return RenamedTensors(head, {new: files[name] for new, name in names.items()})


def _block(head: int | str, block: int | str) -> str:
    return f"heads.{head}.blocks.{block}"


def _output(head: int | str) -> str:
    return f"heads.{head}.lm_head.weight"


def _rename(name: str, num_blocks: int) -> str:
    """The graph's name; what is no part of a Medusa head keeps its own."""
    if match := _match(_BLOCKS, name):
        return f"{_block(match['head'], match['block'])}.{match['kind']}"
    match = _match(_OUTPUTS, name)
    if match and int(match.groupdict().get("block", num_blocks)) == num_blocks:
        return _output(match["head"])
    return name


def _producer(head: HeadCheckpoint) -> str:
    names = list(head.names())
    if any("blocks." in name for name in names):
        return "vLLM"
    return "ModelOpt" if any(_PREFIX.match(name) for name in names) else "FasterDecoding"


def _outputs(
    head: HeadCheckpoint, tensors: RenamedTensors, num_heads: int
) -> tuple[str | None, ...]:
    """Each head's own output matrix, unless config.json says that they use the target's."""
    own = tuple(_output(i) for i in range(num_heads))
    values = check_values(_Values, head.config, "config.json of the head")
    if values.original_lm_head:  # the target's may be stored once, or not
        return (own[0] if own[0] in tensors.renamed else None,) * num_heads
    if not set(own) & tensors.renamed.keys():
        raise CheckpointError(
            f"{head.source} holds {num_heads} Medusa heads without an output matrix, and its "
            'config.json does not say "original_lm_head": true, with which they would use the '
            "target's. Is the file complete?"
        )
    return own


def _token_map(
    head: HeadCheckpoint, file: str | None, num_rows: int, target_vocab_size: int
) -> tuple[TokenMap | None, tuple[str, ...]]:
    """The target's ids of the rows of the output matrices, and notes about it."""
    if file is None and num_rows != target_vocab_size:
        raise CheckpointError(
            f"{head.source}: its heads predict {num_rows} tokens, the target has "
            f"{target_vocab_size}, and there is no tensor 'token_map' from the first to the "
            "second. Is the head of this target?"
        )
    if file is None:
        return None, ()
    token_map = head.indices(file)
    check_token_map(token_map, target_vocab_size, f"{head.source}: {file}")
    if num_rows == len(token_map):
        return token_map, ()
    if num_rows == target_vocab_size:
        return None, (f"{file} is not used: the heads are stored for the whole vocabulary.",)
    raise CheckpointError(
        f"{head.source}: its heads predict {num_rows} tokens, but {file} has {len(token_map)} "
        f"entries and the target {target_vocab_size} tokens. Download it again."
    )
