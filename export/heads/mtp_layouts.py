"""How published checkpoints name and arrange their multi-token-prediction (MTP) layer.

Every one of them computes, for the token t[i+1] and the hidden state h[i] (DeepSeek-V3,
arXiv 2412.19437, section 2.2),

    x = input_proj(cat(embedding_norm(e(t[i+1])), hidden_norm(h[i])))      or hidden state first
    y = decoder_layer(x)
    logits of t[i+2] = lm_head(final_norm(y))

with the target's embedding and output matrix. Where loaders disagree, the choices here are:

- **Which hidden state is read.** The one after the target's final norm, which is what transformers,
  SGLang, TensorRT-LLM and Megatron hand over. MiMo alone reads the last layer's output before the
  norm: its authors' vLLM model leaves the final norm out of the target for just this.
- **What is recycled.** The same kind of tensor, because `hidden_norm` was fitted to it: an RMSNorm
  undoes the scale but not the weights of the norm before it. So y goes through `final_norm` where
  the target's state did, and does not for MiMo.
- **Ernie-4.5 has no final norm of its own**: training and Baidu's own runtime use the target's.
- **Position 0 is like any other.** Some loaders zero e(t[1]) there. That fits an alignment in which
  row i holds t[i], whose first row has no hidden state; no training code does it.

Norm weights are used as they are: Qwen3-Next stores them less 1, but its recurrent layers are
refused, and the Qwen3 and Qwen3-MoE targets whose MTP layer has its names do not.
"""

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from specexport.export.manifest import FINAL_NORM, Tap


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The checkpoint's modules; `{i}` stands for the layer's number."""

    embedding_norm: str
    hidden_norm: str
    input_proj: str
    block: str
    """The decoder layer."""
    final_norm: str | None
    """None: the target's serves."""
    embedding: str | None = None
    """Where a copy of the target's embedding may lie."""
    lm_head: str | None = None
    """Where a copy of the target's output matrix may lie."""

    def numbered(self, layer: int) -> "MtpNames":
        """The names of one layer."""
        return MtpNames(*(name and name.format(i=layer) for name in astuple(self)))


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """One way to name and arrange an MTP layer."""

    name: str
    """For people."""
    names: MtpNames
    follows_target: bool = False
    """Layers are numbered on from the target's, instead of from 0."""
    hidden_first: bool = False
    """The hidden state goes before the embedding into the input projection."""
    reads_normed: bool = True
    """Reads, and recycles, hidden states after a final norm instead of before it."""

    def tap(self, num_target_layers: int) -> Tap:
        """The hidden state of the target that the layer reads."""
        return FINAL_NORM if self.reads_normed else num_target_layers - 1

    def layers(self, names: Iterable[str], num_target_layers: int) -> list[int]:
        """Numbers of the MTP layers of this layout among a checkpoint's tensors."""
        pattern = re.compile(re.escape(self.names.block).replace(r"\{i\}", r"([0-9]{1,9})") + r"\.")
        found = {int(match[1]) for name in names if (match := pattern.match(name))}
        first = num_target_layers if self.follows_target else 0
        return sorted(number for number in found if number >= first)


LAYOUTS = (
    MtpLayout(
        "MTP, DeepSeek-V3 and GLM-4.5 layout",
        MtpNames(
            embedding_norm="model.layers.{i}.enorm",
            hidden_norm="model.layers.{i}.hnorm",
            input_proj="model.layers.{i}.eh_proj",
            block="model.layers.{i}",
            final_norm="model.layers.{i}.shared_head.norm",
            embedding="model.layers.{i}.embed_tokens",
            lm_head="model.layers.{i}.shared_head.head",
        ),
        follows_target=True,
    ),
    MtpLayout(
        "MTP, MiMo layout",
        MtpNames(
            embedding_norm="model.mtp_layers.{i}.token_layernorm",
            hidden_norm="model.mtp_layers.{i}.hidden_layernorm",
            input_proj="model.mtp_layers.{i}.input_proj",
            block="model.mtp_layers.{i}",
            final_norm="model.mtp_layers.{i}.final_layernorm",
        ),
        hidden_first=True,
        reads_normed=False,
    ),
    MtpLayout(
        "MTP, Qwen3-Next layout",
        MtpNames(
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            input_proj="mtp.fc",
            block="mtp.layers.{i}",
            final_norm="mtp.norm",
        ),
    ),
    MtpLayout(
        "MTP, Ernie-4.5 layout",
        MtpNames(
            embedding_norm="model.mtp_emb_norm.{i}",
            hidden_norm="model.mtp_hidden_norm.{i}",
            input_proj="model.mtp_linear_proj.{i}",
            block="model.mtp_block.{i}",
            final_norm=None,
        ),
    ),
)
