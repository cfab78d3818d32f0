"""EAGLE-3 heads as every producer publishes them, and the paper's equation in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.heads_tiny import (
    HEAD_DIM,
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
    write_head,
)
from tests.tiny import VOCAB_SIZE
from tests.tiny_mla import LATENT_CONFIG, latent_attention, latent_weights, small_latents

V_DRAFT = 90
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def draft_ids() -> torch.Tensor:
    """The target's ids of a reduced vocabulary, rising."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(5))[:V_DRAFT].sort()[
        0
    ]


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def legacy_norms(name: str) -> str:
    for i, level in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{i}.", f"aux_norm_{level}.")
    return midlayer(name)


def as_it_is(name: str) -> str:
    return name


def with_prefix(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"


@dataclass(frozen=True)
class Case:
    """A head as one producer publishes it."""

    layout: str
    config: dict[str, Any]
    spell: Callable[[str], str] = midlayer
    kind: str = "safetensors"
    size: int = HIDDEN
    head_dim: int = HEAD_DIM
    num_layers: int = 1
    reduced: bool = True
    with_t2d: bool = True
    own_embedding: bool = False
    own_lm_head: bool = True
    fc_norm: bool = False
    input_norm: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()
    fc_bias: bool = False
    layer_config: dict[str, Any] = field(default_factory=lambda: LAYER_CONFIG)
    norm_before_residual: bool = False
    norm_output: bool = False
    edit: Callable[[Tensors], Tensors] = lambda w: w
    """Changes the random weights."""

    @property
    def is_latent(self) -> bool:
        return "kv_lora_rank" in self.layer_config

    def weights(self) -> Tensors:
        """By the names of the equation, which are ModelOpt's."""
        random = Random()
        w = self._layer(random, "layers.0", 2 * self.size)
        for i in range(1, self.num_layers):
            w |= self._layer(random, f"layers.{i}", self.size)
            w[f"layers.{i}.input_layernorm.weight"] = random.norm(self.size)
        w["fc.weight"] = random.matrix(self.size, 3 * HIDDEN)
        for name in ("layers.0.hidden_norm", "layers.0.input_layernorm", "norm"):
            w[f"{name}.weight"] = random.norm(self.size)
        if self.fc_bias:
            w["fc.bias"] = random.matrix(self.size)
        if self.own_embedding:
            w["embed_tokens.weight"] = random.matrix(VOCAB_SIZE, self.size)
        if self.own_lm_head:
            w["lm_head.weight"] = random.matrix(V_DRAFT if self.reduced else VOCAB_SIZE, self.size)
        if self.fc_norm:
            w |= {f"fc_norm.{i}.weight": random.norm(HIDDEN) for i in range(3)}
        if self.input_norm:
            w["input_norm.weight"] = random.norm(3 * HIDDEN)
        if self.qk_norm:
            w |= {f"layers.0.self_attn.{x}_norm.weight": random.norm(self.head_dim) for x in "qk"}
        return self.edit(w)

    def _layer(self, random: Random, name: str, input_size: int) -> Tensors:
        w = layer_weights(
            random,
            name,
            size=self.size,
            input_size=input_size,
            head_dim=self.head_dim,
            biases=self.biases,
        )
        if not self.is_latent:
            return w
        dense = {key: tensor for key, tensor in w.items() if ".self_attn." not in key}
        return dense | latent_weights(
            random,
            f"{name}.self_attn",
            self.layer_config,
            input_size=input_size,
            biases=self.biases,
        )

    def tensors(self) -> Tensors:
        """As the file holds them."""
        found = {self.spell(name): tensor for name, tensor in self.weights().items()}
        if self.reduced:
            found["d2t"] = draft_ids() - torch.arange(V_DRAFT)
            if self.with_t2d:
                found["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), draft_ids())
        return found

    def write(self, folder: Path) -> Path:
        return write_head(folder, self.config, self.tensors(), self.kind)


SAFEAI = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": V_DRAFT}
SPECFORGE = {**SAFEAI, "architectures": ["LlamaForCausalLMEagle3"]}
MODELOPT = {
    **SPECFORGE,
    "rope_scaling": {"rope_type": "default", "rope_theta": 5000.0},
    "attention_bias": False,
    "pretraining_tp": None,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    },
}
ANGELSLIM = {
    **SAFEAI,
    "architectures": ["Eagle3LlamaForCausalLM"],
    "tie_word_embeddings": True,
    "aux_hidden_states_layer_ids": [1, 3, 4],
}


def speculators(layers: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": V_DRAFT,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        **config,
    }


QWEN3_LAYERS = {
    **{key: value for key, value in LAYER_CONFIG.items() if key != "rope_theta"},
    "model_type": "qwen3",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "max_window_layers": 28,
}
LATENT = {**MODELOPT, **LATENT_CONFIG, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
LATENT_PLAIN = {"q_lora_rank": None, "rope_scaling": None}
NARROW = {**LAYER_CONFIG, "hidden_size": 24, "target_hidden_size": HIDDEN}

CASES = {
    "SafeAILab": Case(
        "SafeAILab",
        {**SAFEAI, "head_dim": None},
        kind="bin",
        head_dim=8,
        layer_config={**LAYER_CONFIG, "head_dim": None},
    ),
    "SafeAILab, whole vocabulary": Case(
        "SafeAILab", {**SAFEAI, "draft_vocab_size": VOCAB_SIZE}, reduced=False
    ),
    "SafeAILab, narrower than the target": Case(
        "SafeAILab",
        {**SAFEAI, **NARROW},
        size=24,
        own_embedding=True,
        layer_config=NARROW,
    ),
    "SpecForge": Case("SpecForge", SPECFORGE, own_embedding=True, kind="safetensors-shards"),
    "SpecForge, llama3 RoPE": Case(
        "SpecForge",
        {**SPECFORGE, "rope_scaling": LLAMA3},
        layer_config={**LAYER_CONFIG, "rope_scaling": LLAMA3},
    ),
    "SpecForge, EAGLE-3.1": Case(
        "SpecForge",
        {**SPECFORGE, "fc_norm": True, "norm_output": True},
        fc_norm=True,
        norm_output=True,
    ),
    "SpecForge, older EAGLE-3.1": Case(
        "SpecForge", {**SPECFORGE, "use_aux_norm": True}, spell=legacy_norms, fc_norm=True
    ),
    "ModelOpt": Case("ModelOpt", MODELOPT, spell=as_it_is, with_t2d=False),
    "ModelOpt, biases": Case(
        "ModelOpt",
        {**MODELOPT, "attention_bias": True, "mlp_bias": True},
        spell=as_it_is,
        biases=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        fc_bias=True,
    ),
    "ModelOpt, the target's output matrix": Case(
        "ModelOpt",
        {**MODELOPT, "draft_vocab_size": VOCAB_SIZE},
        spell=as_it_is,
        reduced=False,
        own_lm_head=False,
    ),
    "ModelOpt, latent attention": Case(
        "ModelOpt",
        LATENT,
        spell=as_it_is,
        with_t2d=False,
        layer_config=LATENT_CONFIG,
        edit=small_latents,
    ),
    "ModelOpt, latent attention, queries in one step": Case(
        "ModelOpt",
        {**LATENT, **LATENT_PLAIN, "attention_bias": None},
        fc_norm=True,
        biases=("kv_a_proj_with_mqa", "o_proj"),
        layer_config={**LATENT_CONFIG, **LATENT_PLAIN},
    ),
    "ModelOpt, latent attention, halves, two layers": Case(
        "ModelOpt",
        {
            **LATENT,
            "architectures": ["Eagle3DeepseekV3ForCausalLM"],
            "num_hidden_layers": 2,
            "rope_interleave": False,
            "norm_output": True,
        },
        spell=as_it_is,
        num_layers=2,
        norm_output=True,
        layer_config={**LATENT_CONFIG, "rope_interleave": False},
    ),
    "AngelSlim": Case("AngelSlim", ANGELSLIM, own_embedding=True),
    "speculators, Llama": Case(
        "speculators",
        speculators(LAYER_CONFIG),
        spell=as_it_is,
        own_embedding=True,
        norm_before_residual=True,
    ),
    "speculators, Qwen3": Case(
        "speculators",
        speculators(QWEN3_LAYERS, norm_before_residual=False, norm_before_fc=True),
        spell=as_it_is,
        qk_norm=True,
        input_norm=True,
    ),
    "speculators, two layers": Case(
        "speculators",
        speculators({**LAYER_CONFIG, "num_hidden_layers": 2}, norm_before_residual=True),
        spell=as_it_is,
        num_layers=2,
        norm_before_residual=True,
    ),
    "prefixed names": Case("SafeAILab", SAFEAI, spell=with_prefix),
    "tied to its own embedding": Case(
        "SafeAILab",
        {**SAFEAI, "tie_word_embeddings": True, "draft_vocab_size": None},
        reduced=False,
        own_embedding=True,
        own_lm_head=False,
    ),
}


def fuse(w: Tensors, taps: torch.Tensor) -> torch.Tensor:  # [M, 3 * H_target] -> [M, H]
    x = taps.double()
    if "input_norm.weight" in w:
        x = rms_norm(x, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        parts = x.chunk(3, dim=-1)
        x = torch.cat([rms_norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], dim=-1)
    return linear(w, "fc", x)


def reference(
    case: Case, target: Lender, ids: list[int], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and recycled states of all rows of one sequence."""
    w = case.weights()
    table = w.get("embed_tokens.weight", target.embedding).double()
    e = rms_norm(table[ids], w["layers.0.input_layernorm.weight"])
    g = rms_norm(features, w["layers.0.hidden_norm.weight"])
    x, read = g if case.norm_before_residual else features, torch.cat([e, g], dim=-1)
    attend = latent_attention if case.is_latent else attention
    for i in range(case.num_layers):
        name, positions = f"layers.{i}", torch.arange(len(ids))
        if i > 0:
            read = rms_norm(x, w[f"{name}.input_layernorm.weight"])
        h = x + attend(w, f"{name}.self_attn", read, positions, case.layer_config)
        x = h + mlp(w, f"{name}.mlp", rms_norm(h, w[f"{name}.post_attention_layernorm.weight"]))
    normed = rms_norm(x, w["norm.weight"])
    output = w.get(
        "lm_head.weight", table if case.config["tie_word_embeddings"] else target.lm_head
    )
    return normed @ output.double().T, normed if case.norm_output else x
