"""Small random checkpoints with a multi-token-prediction layer, and its equations in plain torch.

A target of transformers is made with one layer more than it says. The last layer becomes the block
of the MTP layer: transformers stores its tensors, here they get their published names, and the
reference runs transformers' own module.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import edit_config, make_model, write_checkpoint

NUM_LAYERS = 2
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    """Published names, and what is special about a family's equation."""

    family: str
    """Of the target, in `tests.tiny`."""
    block: str
    norms: tuple[str, str]
    """Of the embedding, of the hidden state."""
    projection: str
    final_norm: str | None
    """None: the target's."""
    copies: tuple[str, str] | None = None
    """Embedding and output matrix that are stored again."""
    hidden_first: bool = False
    reads_normed: bool = True
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of the target's config."""


_DEEPSEEK: dict[str, Any] = {
    "block": "model.layers.2",
    "norms": ("model.layers.2.enorm", "model.layers.2.hnorm"),
    "projection": "model.layers.2.eh_proj",
    "final_norm": "model.layers.2.shared_head.norm",
    "copies": ("model.layers.2.embed_tokens", "model.layers.2.shared_head.head"),
}
_QWEN: dict[str, Any] = {
    "block": "mtp.layers.0",
    "norms": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    "projection": "mtp.fc",
    "final_norm": "mtp.norm",
}
PUBLISHED = {
    "deepseek_v3": Published(family="deepseek_v3", **_DEEPSEEK),
    "glm4_moe": Published(family="glm4_moe", **_DEEPSEEK),
    "mimo": Published(
        family="mimo",
        block="model.mtp_layers.0",
        norms=("model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm"),
        projection="model.mtp_layers.0.input_proj",
        final_norm="model.mtp_layers.0.final_layernorm",
        hidden_first=True,
        reads_normed=False,
    ),
    "qwen3": Published(family="qwen3", **_QWEN),
    "qwen3_moe": Published(family="qwen3_moe", **_QWEN),
    "ernie4_5_moe": Published(
        family="ernie4_5_moe",
        block="model.mtp_block.0",
        norms=("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
        projection="model.mtp_linear_proj.0",
        final_norm=None,
        sizes={"moe_layer_end_index": NUM_LAYERS - 1},  # the MTP layer's MLP is dense
    ),
}


@dataclass(frozen=True)
class MtpReference:
    """A target of transformers, and its MTP layer as published, over whole sequences."""

    model: Any
    published: Published
    weights: Tensors
    """`embedding_norm`, `hidden_norm`, `projection`, `final_norm`, `embedding`, `lm_head`."""

    def target_states(self, ids: list[int]) -> torch.Tensor:
        """[n, H]: what the MTP layer reads of the target."""
        states: list[torch.Tensor] = []
        last_layer = self.model.model.layers[NUM_LAYERS - 1]
        hook = last_layer.register_forward_hook(lambda module, args, out: states.append(out))
        with torch.inference_mode():
            normed = self.model.model(torch.tensor([ids])).last_hidden_state
        hook.remove()
        return (normed if self.published.reads_normed else states[0])[0].clone()

    def target_logits(self, ids: list[int]) -> torch.Tensor:
        """[n, V]: the target's own."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits

    def run(self, ids: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, V] and recycled states [n, H]; row i has t[i+1], h[i] and position i."""
        w, n = self.weights, len(ids)
        with torch.inference_mode():
            e = self._norm(w["embedding"][torch.tensor(ids)], w["embedding_norm"])
            h = self._norm(hidden, w["hidden_norm"])
            pair = (h, e) if self.published.hidden_first else (e, h)
            x = (torch.cat(pair, dim=-1) @ w["projection"].T)[None]
            positions = torch.arange(n)[None]
            y = self.model.model.layers[NUM_LAYERS](
                x,
                attention_mask=torch.full((n, n), -torch.inf).triu(1)[None, None],
                position_ids=positions,
                position_embeddings=self.model.model.rotary_emb(x, positions),
            )[0]
            normed = self._norm(y, w["final_norm"])
            logits = torch.nn.functional.linear(normed, w["lm_head"], self.model.lm_head.bias)
            return logits, normed if self.published.reads_normed else y

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def write_mtp_checkpoint(
    path: Path,
    kind: str,
    *,
    edit: Callable[[Any], None] = lambda model: None,
    edit_own: Callable[[Tensors], Tensors] = lambda own: own,
    **overrides: Any,
) -> MtpReference:
    """Write a checkpoint of `kind` under its published names.

    `edit` may change the model first, whose last layer is the MTP block; `edit_own` the rest of
    the MTP layer.
    """
    published = PUBLISHED[kind]
    sizes = {"num_hidden_layers": NUM_LAYERS + 1, **published.sizes, **overrides}
    write_checkpoint(path, published.family, edit=edit, **sizes)
    model = make_model(published.family, **sizes)
    edit(model)
    own = edit_own(_own_weights(model, published))
    _edit_tensors(path, lambda tensors: _publish(tensors, own, published))
    # As published, the MTP layer does not count.
    config = json.loads((path / "config.json").read_text())
    kinds = {k: v[:NUM_LAYERS] for k, v in config.items() if k.endswith("layer_types") and v}
    edit_config(path, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1, **kinds)
    model.config.num_hidden_layers = NUM_LAYERS  # transformers runs as many of its layers
    return MtpReference(model, published, own)


def replace_tensors(path: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Put tensors into a checkpoint, or with None take them out."""

    def edit(tensors: Tensors) -> Tensors:
        merged = {**tensors, **changes}
        return {name: tensor for name, tensor in merged.items() if tensor is not None}

    _edit_tensors(path, edit)


def _own_weights(model: Any, published: Published) -> Tensors:
    size = model.config.hidden_size
    generator = torch.Generator().manual_seed(7)

    def norm() -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    return {
        "embedding_norm": norm(),
        "hidden_norm": norm(),
        "projection": torch.randn(size, 2 * size, generator=generator) * 0.2,
        "final_norm": norm() if published.final_norm else model.model.norm.weight.detach(),
        "embedding": model.get_input_embeddings().weight.detach().clone(),
        "lm_head": model.lm_head.weight.detach().clone(),
    }


def _publish(tensors: Tensors, own: Tensors, published: Published) -> Tensors:
    """The last layer's tensors under the MTP block's name, and the layer's own ones beside them."""
    last_layer = f"model.layers.{NUM_LAYERS}."
    result = {
        re.sub(f"^{re.escape(last_layer)}", f"{published.block}.", name): tensor
        for name, tensor in tensors.items()
    }
    stored = {
        published.norms[0]: own["embedding_norm"],
        published.norms[1]: own["hidden_norm"],
        published.projection: own["projection"],
    }
    if published.final_norm:
        stored[published.final_norm] = own["final_norm"]
    if published.copies:
        stored |= {published.copies[0]: own["embedding"], published.copies[1]: own["lm_head"]}
    return result | {f"{module}.weight": tensor for module, tensor in stored.items()}


def _edit_tensors(path: Path, edit: Callable[[Tensors], Tensors]) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(edit(tensors), file, metadata={"format": "pt"})
