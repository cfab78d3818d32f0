"""EAGLE-1/2 heads, and the paper's equation in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.heads_tiny import (
    HIDDEN,
    LAYER_CONFIG,
    Lender,
    Random,
    Tensors,
    attention,
    layer_weights,
    linear,
    mlp,
    rms_norm,
)
from tests.tiny import VOCAB_SIZE

CONFIG = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLM"]}


@dataclass(frozen=True)
class Case:
    """A head: what its file holds beside the bare minimum."""

    kind: str = "bin"
    own_embedding: bool = False
    fc_bias: bool = False
    biases: tuple[str, ...] = ()
    num_layers: int = 1
    head_dim: int = 16
    tied: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[Tensors], Tensors] = lambda w: w
    """Changes the random weights."""

    @property
    def full_config(self) -> dict[str, Any]:
        return {**CONFIG, "num_hidden_layers": self.num_layers, **self.config}

    def weights(self) -> Tensors:
        random = Random()
        found = {"fc.weight": random.matrix(HIDDEN, 2 * HIDDEN)}
        if self.fc_bias:
            found["fc.bias"] = random.matrix(HIDDEN)
        if self.own_embedding:
            found["embed_tokens.weight"] = random.matrix(VOCAB_SIZE, HIDDEN)
        for i in range(self.num_layers):
            name = f"layers.{i}"
            found |= layer_weights(random, name, head_dim=self.head_dim, biases=self.biases)
            if i > 0:
                found[f"{name}.input_layernorm.weight"] = random.norm(HIDDEN)
        return self.edit(found)


CASES = {
    "reference": Case(own_embedding=True, fc_bias=True, head_dim=8, config={"head_dim": None}),
    "without bias and embedding": Case("safetensors", config={"bias": False}),
    "of Qwen2": Case(biases=("q_proj", "k_proj", "v_proj"), config={"attention_bias": False}),
    "two layers, in shards": Case("bin-shards", num_layers=2, fc_bias=True),
    "every bias": Case(
        biases=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ),
    "of a tied target": Case(tied=True),
    "linear RoPE": Case(config={"rope_scaling": {"type": "linear", "factor": 2.0}}),
}


def reference(
    w: Tensors, config: dict[str, Any], target: Lender, ids: list[int], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states of all rows of one sequence: `fc(cat(e, h))` → layers → target's head."""
    table = w.get("embed_tokens.weight", target.embedding).double()
    x = linear(w, "fc", torch.cat([table[ids], features.double()], dim=-1))
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}"
        read = x if i == 0 else rms_norm(x, w[f"{name}.input_layernorm.weight"])
        h = x + attention(w, f"{name}.self_attn", read, torch.arange(len(ids)), config)
        x = h + mlp(w, f"{name}.mlp", rms_norm(h, w[f"{name}.post_attention_layernorm.weight"]))
    return x @ target.lm_head.T, x
