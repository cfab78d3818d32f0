"""The step graph of a multi-token-prediction layer; `mtp_layouts` opens with its equations."""

from dataclasses import dataclass

import onnx_ir as ir

from specexport.export.config import DecoderConfig
from specexport.export.decoder import EMBEDDING, LM_HEAD, LM_HEAD_BIAS, Layer, decoder_layer
from specexport.export.heads.check import check_head_tensors
from specexport.export.heads.mtp_layouts import MtpLayout, MtpNames
from specexport.export.heads.plan import HeadGraphs, RenamedTensors
from specexport.export.heads.step_graph import (
    StepInputs,
    StepOutputs,
    close_step_graph,
    step_inputs,
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

_TARGET_FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class MtpHead:
    """An MTP layer: its arrangement, its tensors, and its sizes as a decoder of one layer."""

    layout: MtpLayout
    names: MtpNames
    """Of this layer; without the embedding and the output matrix where it borrows them."""
    tensors: RenamedTensors
    config: DecoderConfig

    def build(self, lender: GraphBuilder, weight_type: FloatType, max_length: int) -> HeadGraphs:
        """The step graph; raises `CheckpointError` where the tensors do not fit it.

        `lender` is the target's builder.
        """
        g = GraphBuilder(weight_type, lender)
        inputs = step_inputs(g, self.config, max_length)
        block = Layer(self.names.block, 0)
        x = self._joined(g, inputs)
        y, present = decoder_layer(g, self.config, block, x, inputs.step, inputs.pasts[0])
        rows = wanted_rows(g, y, self.config.hidden_size, inputs.logits_indices)
        normed = self._final_norm(g, rows)
        outputs = StepOutputs(
            logits=self._logits(g, normed),
            recycled=normed if self.layout.reads_normed else rows,
            presents=[present],
        )
        step = close_step_graph(g, self.config, inputs, outputs)
        graphs = HeadGraphs(step=step, step_config=self.config)
        check_head_tensors(self.layout.name, self.tensors, graphs)
        return graphs

    def _joined(self, g: GraphBuilder, inputs: StepInputs) -> ir.Value:
        """`input_proj(cat(embedding_norm(e), hidden_norm(h)))`: [B, Q, H]."""
        names, size, eps = self.names, self.config.hidden_size, self.config.norm_eps
        table = self._vocabulary(g, names.embedding) if names.embedding else g.shared(EMBEDDING)
        e = rms_norm(g, embedding(g, inputs.input_ids, table), names.embedding_norm, size, eps)
        h = rms_norm(g, inputs.hidden_states, names.hidden_norm, size, eps)
        joined = g.op("Concat", *((h, e) if self.layout.hidden_first else (e, h)), axis=-1)
        return linear(g, joined, names.input_proj, (2 * size, size), bias=False)

    def _final_norm(self, g: GraphBuilder, x: ir.Value) -> ir.Value:
        size, eps = self.config.hidden_size, self.config.norm_eps
        if self.names.final_norm is not None:
            return rms_norm(g, x, self.names.final_norm, size, eps)
        return g.op("RMSNormalization", x, g.shared(_TARGET_FINAL_NORM), axis=-1, epsilon=eps)

    def _logits(self, g: GraphBuilder, normed: ir.Value) -> ir.Value:
        if self.names.lm_head is not None:
            return lm_head(g, normed, self._vocabulary(g, self.names.lm_head))
        weight = g.shared(EMBEDDING if self.config.tied_embeddings else LM_HEAD)
        bias = g.shared(LM_HEAD_BIAS) if self.config.lm_head_bias else None
        return lm_head(g, normed, weight, bias)

    def _vocabulary(self, g: GraphBuilder, module: str) -> ir.Value:  # [V, H]
        return g.matrix(f"{module}.weight", self.config.vocab_size, self.config.hidden_size)
