"""EAGLE-3 heads (arXiv 2503.01840): they draft from hidden states of several layers of the target.

Fusing: `g = fc(cat(taps))`, for the target's states only; EAGLE-3.1 normalises each tap before
(`fc_norm`), speculators the concatenation (`input_norm`).
A step: the first layer's attention reads `cat(input_layernorm(e), hidden_norm(g))`, the embedding
first, and its residual is g itself; then `logits = lm_head(norm(x))`, and x before that norm is
what the next step reads in the place of g.
Producers' differences are in `eagle3_layouts` and `taps`; where a file speaks for itself (norms,
biases, latent attention, own embedding and output matrix), the file is believed, whatever
config.json says.
"""

import re
from dataclasses import dataclass, replace

import onnx_ir as ir

from specexport.errors import CheckpointError
from specexport.export.checkpoint import TensorSource
from specexport.export.config import DecoderConfig
from specexport.export.graph_io import DecoderGraph, close_graph, graph_input, graph_output
from specexport.export.heads.check import check_head_tensors
from specexport.export.heads.eagle3_layouts import Eagle3Layout, check_norms, read_layout
from specexport.export.heads.eagle_layers import LayerInput, eagle_layers
from specexport.export.heads.head_checkpoint import HeadCheckpoint
from specexport.export.heads.head_config import read_head_config
from specexport.export.heads.names import FC, FC_BIAS, rename_eagle
from specexport.export.heads.plan import HeadGraphs, HeadPlan, RenamedTensors
from specexport.export.heads.step_graph import StepOutputs, close_step_graph, step_inputs
from specexport.export.heads.taps import read_taps
from specexport.export.heads.token_map import read_token_map
from specexport.export.heads.vocabulary_weights import (
    borrow_equal_embedding,
    check_embedding,
    embedding_table,
    num_outputs,
    output_matrix,
)
from specexport.export.layers import (
    GraphBuilder,
    embedding,
    linear,
    lm_head,
    rms_norm,
    wanted_rows,
)
from specexport.export.manifest import FloatType

_MAP = re.compile(r"(model\.)?(d2t|t2d)")


@dataclass(frozen=True, slots=True)
class _Eagle3:
    """One head of `target`, which reads `num_taps` of its hidden states."""

    layout: Eagle3Layout
    config: DecoderConfig
    target: DecoderConfig
    tensors: RenamedTensors
    num_taps: int

    def build(self, lender: GraphBuilder, weight_type: FloatType, max_length: int) -> HeadGraphs:
        """Both graphs; raises `CheckpointError` where the file does not fit them."""
        graphs = HeadGraphs(
            step=self._step(GraphBuilder(weight_type, lender), max_length),
            step_config=self.config,
            fuse=self._fuse(GraphBuilder(weight_type)),
        )
        check_head_tensors(self.layout.name, self.tensors, graphs)
        return graphs

    def _fuse(self, g: GraphBuilder) -> DecoderGraph:
        """hidden_states [M, n * H_target] → features [M, H]."""
        tap_size, eps = self.target.hidden_size, self.config.norm_eps
        width = self.num_taps * tap_size
        taps = graph_input("hidden_states", ir.DataType.FLOAT, "rows", width)
        x = rms_norm(g, taps, "input_norm", width, eps) if self._has("input_norm.weight") else taps
        if self._has("fc_norm.0.weight"):
            x = self._norm_each(g, x)
        sizes = (width, self.config.hidden_size)
        features = linear(g, x, "fc", sizes, bias=self._has(FC_BIAS))
        output = graph_output(features, "features", "rows", self.config.hidden_size)
        return close_graph(g, [taps], [output])

    def _norm_each(self, g: GraphBuilder, taps: ir.Value) -> ir.Value:  # [M, n * H_target]
        """Each tap by a norm of its own."""
        size, normed = self.target.hidden_size, []
        for i in range(self.num_taps):
            start, end = g.ints(i * size), g.ints((i + 1) * size)
            tap = g.op("Slice", taps, start, end, g.ints(1))
            normed.append(rms_norm(g, tap, f"fc_norm.{i}", size, self.config.norm_eps))
        return g.op("Concat", *normed, axis=-1)

    def _step(self, g: GraphBuilder, max_length: int) -> DecoderGraph:
        size, eps = self.config.hidden_size, self.config.norm_eps
        inputs = step_inputs(g, self.config, max_length)
        feature = inputs.hidden_states
        e = embedding(g, inputs.input_ids, embedding_table(g, self.tensors, size))
        e = rms_norm(g, e, "layers.0.input_layernorm", size, eps)
        normed = rms_norm(g, feature, "layers.0.hidden_norm", size, eps)
        residual = normed if self.layout.norm_before_residual else feature
        first = LayerInput(residual, g.op("Concat", e, normed, axis=-1), 2 * size)
        x, presents = eagle_layers(g, self.config, first, inputs)
        rows = wanted_rows(g, x, size, inputs.logits_indices)
        last = rms_norm(g, rows, "norm", size, eps)
        logits = lm_head(g, last, output_matrix(g, self.config, self.tensors, self.target))
        recycled = last if self.layout.norm_output else rows
        return close_step_graph(g, self.config, inputs, StepOutputs(logits, recycled, presents))

    def _has(self, name: str) -> bool:
        return name in self.tensors.renamed


def plan_eagle3(
    head: HeadCheckpoint, target: DecoderConfig, lent: TensorSource | None = None
) -> HeadPlan:
    """Recognise an EAGLE-3 head of `target`; raises `CheckpointError` saying what misfits.

    `lent` holds the target's tensors: a copy of its embedding in the head is then borrowed.
    """
    files = list(head.names())
    layout = read_layout(head.config, files, head.source)
    maps = {name.removeprefix("model."): name for name in files if _MAP.fullmatch(name)}
    tensors = rename_eagle(head, apart=frozenset(maps.values()))
    if "layers.0.hidden_norm.weight" not in tensors.renamed:
        raise CheckpointError(
            f"{head.source} is no EAGLE-3 head: it holds no 'midlayer.hidden_norm.weight' (or "
            "'layers.0.hidden_norm.weight'). Use --method eagle for EAGLE-1 and EAGLE-2."
        )
    check_norms(head.config, tensors.renamed, head.source)
    taps = read_taps(head.config, target.num_layers)
    _check_fc(tensors, len(taps), target)
    config = read_head_config(layout.layers, tensors.renamed, "eagle3", target.vocab_size)
    check_embedding(tensors, config.hidden_size, target)
    config = replace(
        config, vocab_size=num_outputs(config, layout.draft_vocab_size, tensors, target)
    )
    token_map = read_token_map(head, maps, config.vocab_size, target.vocab_size)
    tensors, notes = borrow_equal_embedding(tensors, config, lent)
    eagle3 = _Eagle3(layout, config, target, tensors, len(taps))
    return HeadPlan(layout.name, taps, tensors, eagle3.build, token_map, notes)


def _check_fc(tensors: RenamedTensors, num_taps: int, target: DecoderConfig) -> None:
    if FC not in tensors.renamed:
        return  # the check of all tensors will say so
    shape = tensors.matrix_shape(FC)
    if shape[1] != num_taps * target.hidden_size:
        raise CheckpointError(
            f"{tensors.source}: fc.weight has shape {list(shape)}; {num_taps} hidden states of a "
            f"target of hidden_size {target.hidden_size} have {num_taps * target.hidden_size} "
            "numbers. Is the head of this target?"
        )
