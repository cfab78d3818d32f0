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
- **Position 0 is like any other.** Some loaders zero e(t[1]) there. That belongs to an alignment in
  which row i holds t[i], whose first row has no hidden state; no training code does it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from specexport.export.manifest import FINAL_NORM, Tap

INPUT_PROJ, EMBEDDING_NORM, HIDDEN_NORM = "input_proj", "embedding_norm", "hidden_norm"
BLOCK, OWN_FINAL_NORM = "layers.0", "final_norm"
OWN_EMBEDDING, OWN_LM_HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """One way to name and arrange an MTP layer; `{i}` in a name is the layer's number."""

    name: str
    """For people."""
    modules: dict[str, str]
    """The checkpoint's modules → the names in the graph."""
    first_layer_after_target: bool = False
    """Layers are numbered on from the target's, instead of from 0."""
    hidden_first: bool = False
    """The hidden state goes before the embedding into the input projection."""
    reads_normed: bool = True
    """Reads, and recycles, hidden states after a final norm instead of before it."""

    @property
    def has_final_norm(self) -> bool:
        """False where the target's final norm serves."""
        return OWN_FINAL_NORM in self.modules.values()

    def tap(self, num_target_layers: int) -> Tap:
        """The hidden state of the target that the layer reads."""
        return FINAL_NORM if self.reads_normed else num_target_layers - 1

    def layers(self, names: Iterable[str], num_target_layers: int) -> list[int]:
        """Numbers of the MTP layers of this layout among a checkpoint's tensors."""
        block = next(module for module, renamed in self.modules.items() if renamed == BLOCK)
        pattern = re.compile(block.replace(".", r"\.").format(i=r"(\d+)") + r"\.")
        found = {int(match.group(1)) for name in names if (match := pattern.match(name))}
        first = num_target_layers if self.first_layer_after_target else 0
        return sorted(number for number in found if number >= first)

    def checkpoint_name(self, graph_name: str, layer: int) -> str:
        """The checkpoint's name of a tensor that the graph of MTP layer `layer` calls for."""
        for module, renamed in self.modules.items():
            if graph_name.startswith(f"{renamed}."):
                return module.format(i=layer) + graph_name.removeprefix(renamed)
        raise KeyError(graph_name)


LAYOUTS = (
    MtpLayout(
        name="MTP, DeepSeek-V3 and GLM-4.5 layout",
        modules={
            "model.layers.{i}.enorm": EMBEDDING_NORM,
            "model.layers.{i}.hnorm": HIDDEN_NORM,
            "model.layers.{i}.eh_proj": INPUT_PROJ,
            "model.layers.{i}.shared_head.norm": OWN_FINAL_NORM,
            "model.layers.{i}.shared_head.head": OWN_LM_HEAD,
            "model.layers.{i}.embed_tokens": OWN_EMBEDDING,
            "model.layers.{i}": BLOCK,
        },
        first_layer_after_target=True,
    ),
    MtpLayout(
        name="MTP, MiMo layout",
        modules={
            "model.mtp_layers.{i}.token_layernorm": EMBEDDING_NORM,
            "model.mtp_layers.{i}.hidden_layernorm": HIDDEN_NORM,
            "model.mtp_layers.{i}.input_proj": INPUT_PROJ,
            "model.mtp_layers.{i}.final_layernorm": OWN_FINAL_NORM,
            "model.mtp_layers.{i}": BLOCK,
        },
        hidden_first=True,
        reads_normed=False,
    ),
    MtpLayout(
        name="MTP, Qwen3-Next layout",
        modules={
            "mtp.pre_fc_norm_embedding": EMBEDDING_NORM,
            "mtp.pre_fc_norm_hidden": HIDDEN_NORM,
            "mtp.fc": INPUT_PROJ,
            "mtp.norm": OWN_FINAL_NORM,
            "mtp.layers.{i}": BLOCK,
        },
    ),
    MtpLayout(
        name="MTP, Ernie-4.5 layout",
        modules={
            "model.mtp_emb_norm.{i}": EMBEDDING_NORM,
            "model.mtp_hidden_norm.{i}": HIDDEN_NORM,
            "model.mtp_linear_proj.{i}": INPUT_PROJ,
            "model.mtp_block.{i}": BLOCK,
        },
    ),
)


def is_mtp_tensor(name: str, num_target_layers: int) -> bool:
    """Whether a target's checkpoint holds this tensor for its MTP layers."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None:
        return int(layer.group(1)) >= num_target_layers
    return name.startswith(("mtp.", "model.mtp_"))
