"""The step graph of a multi-token-prediction layer; `mtp_layouts` opens with its equations."""

from dataclasses import dataclass

import onnx_ir as ir

from specexport.export.config import DecoderConfig
from specexport.export.decoder import EMBEDDING, LM_HEAD, Layer, decoder_layer
from specexport.export.heads.mtp_layouts import (
    BLOCK,
    EMBEDDING_NORM,
    HIDDEN_NORM,
    INPUT_PROJ,
    OWN_EMBEDDING,
    OWN_FINAL_NORM,
    OWN_LM_HEAD,
    MtpLayout,
)
from specexport.export.heads.plan import HeadGraphs
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
from specexport.export.manifest import WeightType

TARGET_FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class MtpHead:
    """An MTP layer: its arrangement, its sizes (one layer), and what it does not borrow."""

    layout: MtpLayout
    config: DecoderConfig
    own_embedding: bool = False
    own_lm_head: bool = False

    def build(self, lender: GraphBuilder, weight_type: WeightType, max_length: int) -> HeadGraphs:
        """The step graph; `lender` is the target's builder."""
        g = GraphBuilder(weight_type, lender)
        inputs = step_inputs(g, self.config, max_length)
        x = self._fused(g, inputs)
        y, present = decoder_layer(g, self.config, Layer(BLOCK, 0), x, inputs.step, inputs.pasts[0])
        rows = wanted_rows(g, y, self.config.hidden_size, inputs.logits_indices)
        normed = self._final_norm(g, rows)
        outputs = StepOutputs(
            logits=lm_head(g, normed, self._lm_head(g)),
            recycled=normed if self.layout.reads_normed else rows,
            presents=[present],
        )
        return HeadGraphs(
            step=close_step_graph(g, self.config, inputs, outputs), step_config=self.config
        )

    def _fused(self, g: GraphBuilder, inputs: StepInputs) -> ir.Value:
        """`input_proj(cat(embedding_norm(e), hidden_norm(h)))`: [B, Q, H]."""
        size, eps = self.config.hidden_size, self.config.norm_eps
        table = self._vocabulary(g, f"{OWN_EMBEDDING}.weight") if self.own_embedding else None
        e = embedding(g, inputs.input_ids, table or g.shared(EMBEDDING))
        e = rms_norm(g, e, EMBEDDING_NORM, size, eps)
        h = rms_norm(g, inputs.hidden_states, HIDDEN_NORM, size, eps)
        pair = (h, e) if self.layout.hidden_first else (e, h)
        return linear(g, g.op("Concat", *pair, axis=-1), INPUT_PROJ, (2 * size, size), bias=False)

    def _final_norm(self, g: GraphBuilder, x: ir.Value) -> ir.Value:
        size, eps = self.config.hidden_size, self.config.norm_eps
        if self.layout.has_final_norm:
            return rms_norm(g, x, OWN_FINAL_NORM, size, eps)
        weight = g.shared(TARGET_FINAL_NORM)
        return g.op("RMSNormalization", x, weight, axis=-1, epsilon=eps)

    def _lm_head(self, g: GraphBuilder) -> ir.Value:
        if self.own_lm_head:
            return self._vocabulary(g, f"{OWN_LM_HEAD}.weight")
        return g.shared(EMBEDDING if self.config.tied_embeddings else LM_HEAD)

    def _vocabulary(self, g: GraphBuilder, name: str) -> ir.Value:  # [V, H]
        return g.matrix(name, self.config.vocab_size, self.config.hidden_size)
