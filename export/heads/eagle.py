"""EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858): they draft the target's features.

`x = fc(cat(e, h))` with the embedding e of a token and the feature h before it, decoder layers
without a norm before the first and after the last, then the target's output matrix. h is what the
target's final norm gives, or the head's own last x. EAGLE-2 is the same file, drafted as a tree.
"""

from dataclasses import dataclass

from specexport.errors import CheckpointError
from specexport.export.checkpoint import TensorSource
from specexport.export.config import DecoderConfig
from specexport.export.graph_io import DecoderGraph
from specexport.export.heads.check import check_head_tensors
from specexport.export.heads.eagle_layers import LayerInput, eagle_layers
from specexport.export.heads.head_checkpoint import HeadCheckpoint
from specexport.export.heads.head_config import read_head_config
from specexport.export.heads.names import FC_BIAS, rename_eagle
from specexport.export.heads.plan import HeadGraphs, HeadPlan, RenamedTensors
from specexport.export.heads.step_graph import StepOutputs, close_step_graph, step_inputs
from specexport.export.heads.vocabulary_weights import (
    borrow_equal_embedding,
    check_embedding,
    embedding_table,
    target_lm_head,
)
from specexport.export.layers import GraphBuilder, embedding, linear, lm_head, wanted_rows
from specexport.export.manifest import FINAL_NORM, FloatType

_LAYOUT = "EAGLE-1/2"


@dataclass(frozen=True, slots=True)
class _Eagle:
    """One head of `target`."""

    config: DecoderConfig
    target: DecoderConfig
    tensors: RenamedTensors

    def build(self, lender: GraphBuilder, weight_type: FloatType, max_length: int) -> HeadGraphs:
        """The one graph; raises `CheckpointError` where the file does not fit it."""
        step = self._step(GraphBuilder(weight_type, lender), max_length)
        graphs = HeadGraphs(step=step, step_config=self.config)
        check_head_tensors(_LAYOUT, self.tensors, graphs)
        return graphs

    def _step(self, g: GraphBuilder, max_length: int) -> DecoderGraph:
        size = self.config.hidden_size
        inputs = step_inputs(g, self.config, max_length)
        e = embedding(g, inputs.input_ids, embedding_table(g, self.tensors, size))
        both = g.op("Concat", e, inputs.hidden_states, axis=-1)
        x = linear(g, both, "fc", (2 * size, size), bias=FC_BIAS in self.tensors.renamed)
        x, presents = eagle_layers(g, self.config, LayerInput(x, x, size), inputs)
        rows = wanted_rows(g, x, size, inputs.logits_indices)
        logits = lm_head(g, rows, target_lm_head(g, self.target))
        return close_step_graph(g, self.config, inputs, StepOutputs(logits, rows, presents))


def plan_eagle(
    head: HeadCheckpoint, target: DecoderConfig, lent: TensorSource | None = None
) -> HeadPlan:
    """Recognise an EAGLE-1/2 head of `target`; raises `CheckpointError` saying what misfits.

    `lent` holds the target's tensors: a copy of its embedding in the head is then borrowed.
    """
    tensors = rename_eagle(head)
    if "layers.0.hidden_norm.weight" in tensors.renamed:
        raise CheckpointError(
            f"{head.source} is an EAGLE-3 head: it holds "
            f"{tensors.renamed['layers.0.hidden_norm.weight']!r}. Use --method eagle3."
        )
    config = read_head_config(head.config, tensors.renamed, "eagle", target.vocab_size)
    if config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{head.source} has hidden_size {config.hidden_size}, the target {target.hidden_size}; "
            "an EAGLE head is as wide as its target. Is the head of this target?"
        )
    check_embedding(tensors, config.hidden_size, target)
    tensors, notes = borrow_equal_embedding(tensors, config, lent)
    eagle = _Eagle(config, target, tensors)
    return HeadPlan(_LAYOUT, (FINAL_NORM,), tensors, eagle.build, notes=notes)
