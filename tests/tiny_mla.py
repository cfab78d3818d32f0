"""Multi-head latent attention of a head: random weights, DeepSeek-V2's equations in plain torch.

Equations (37) to (47) of arXiv 2405.04434 as they are published: every head's keys and values are
projected up from the latent, and nothing is absorbed or cached. DeepSeek-V3's code adds the norms
of the latents and YaRN's factor on the scores.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.heads_tiny import HIDDEN, LAYER_CONFIG, Random, Tensors, linear

LATENT_NORM_EPS = 1e-6
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 1.0,
    "beta_slow": 0.25,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LATENT_CONFIG: dict[str, Any] = {
    **{key: value for key, value in LAYER_CONFIG.items() if key != "head_dim"},
    "model_type": "deepseek_v3",
    "kv_lora_rank": 40,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "rope_scaling": YARN,
}


def latent_weights(
    random: Random,
    name: str,
    config: dict[str, Any],
    *,
    input_size: int = HIDDEN,
    biases: Sequence[str] = (),
) -> Tensors:
    """The attention `name`; `biases` such as "o_proj" get one."""
    heads, latent, rank = (
        config[key] for key in ("num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, rope, value = (config[f"{key}_head_dim"] for key in ("qk_nope", "qk_rope", "v"))
    query = heads * (nope + rope)
    shapes = {"q_proj": (query, input_size)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, input_size), "q_b_proj": (query, rank)}
    shapes |= {
        "kv_a_proj_with_mqa": (latent + rope, input_size),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (config["hidden_size"], heads * value),
    }
    w = {f"{name}.{key}.weight": random.matrix(*shape) for key, shape in shapes.items()}
    w |= {f"{name}.{key}.bias": random.matrix(shapes[key][0]) for key in biases}
    w[f"{name}.kv_a_layernorm.weight"] = random.norm(latent)
    if rank is not None:
        w[f"{name}.q_a_layernorm.weight"] = random.norm(rank)
    return w


def small_latents(w: Tensors) -> Tensors:
    """So small that what their norms add to the mean square counts."""
    edges = {"q_a_proj.weight": None, "kv_a_proj_with_mqa.weight": LATENT_CONFIG["kv_lora_rank"]}
    for name, tensor in w.items():
        if (module := name.split("self_attn.")[-1]) in edges:
            tensor[: edges[module]] *= 2e-3
    return w


def latent_attention(
    w: Tensors, name: str, x: torch.Tensor, positions: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    """Causal latent attention of one sequence: [L, width] -> [L, H], fp64."""
    nope, rope, value = (config[f"{key}_head_dim"] for key in ("qk_nope", "qk_rope", "v"))
    entry = linear(w, f"{name}.kv_a_proj_with_mqa", x)
    latent, key_rope = torch.split(entry, [config["kv_lora_rank"], rope], dim=-1)
    latent = _norm(w, f"{name}.kv_a_layernorm", latent)
    up = _heads(linear(w, f"{name}.kv_b_proj", latent), config)
    key, values = torch.split(up, [nope, value], dim=-1)
    query, query_rope = torch.split(_heads(_queries(w, name, x), config), [nope, rope], dim=-1)
    angles = _angles(positions, config)  # [L, rope / 2], complex
    query_rope, key_rope = (_rotate(y, angles, config) for y in (query_rope, key_rope[None]))
    scores = query @ key.transpose(1, 2) + query_rope @ key_rope.transpose(1, 2)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    probs = (scores * _scale(config)).masked_fill(future, -torch.inf).softmax(-1)
    return linear(w, f"{name}.o_proj", (probs @ values).transpose(0, 1).flatten(1))


def _queries(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    if f"{name}.q_proj.weight" in w:
        return linear(w, f"{name}.q_proj", x)
    compressed = _norm(w, f"{name}.q_a_layernorm", linear(w, f"{name}.q_a_proj", x))
    return linear(w, f"{name}.q_b_proj", compressed)


def _heads(y: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:  # [L, heads * D]
    """[heads, L, D]."""
    return y.view(len(y), config["num_attention_heads"], -1).transpose(0, 1)


def _norm(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x / (mean_square + LATENT_NORM_EPS).sqrt() * w[f"{name}.weight"].double()


def _angles(positions: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Each position's rotation of each pair, times what YaRN makes of its length."""
    own = {"head_dim": config["qk_rope_head_dim"]}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{**config, **own}))
    cos, sin = (table[0].double() for table in rotary(torch.zeros(1), positions[None]))
    num_pairs = cos.shape[-1] // 2
    return torch.complex(cos[:, :num_pairs], sin[:, :num_pairs])


def _rotate(y: torch.Tensor, angles: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Pairs are neighbours, unless config.json says that they are halves."""
    interleaved = config.get("rope_interleave", True)
    first, second = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, dim=-1)
    turned = torch.complex(first.contiguous(), second.contiguous()) * angles
    return torch.cat([turned.real, turned.imag], dim=-1)  # in which order, products do not see


def _scale(config: dict[str, Any]) -> float:
    """1 / sqrt(D), times the square of YaRN's temperature."""
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    yarn = config.get("rope_scaling")
    temperature = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1.0 if yarn else 1.0
    return float(temperature**2 / size**0.5)
