"""Small random checkpoints of every family, written by transformers' own classes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 272
EOS_ID = 257

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    # MiMo's body is Qwen2's, and transformers has no class of its own for it.
    "mimo": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
}
FAMILIES = tuple(_CLASSES)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": EOS_ID,
}
_GROUPED_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "deepseek_v3": {
        **_GROUPED_EXPERTS,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
    "glm4_moe": {**_GROUPED_EXPERTS, "use_qk_norm": True},
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "tie_word_embeddings": False,
    },
}


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random model whose logits are spread enough to be told apart."""
    config_class, model_class = _CLASSES[family]
    values = {**_SIZES, **_FAMILY_SIZES.get(family, {}), **overrides}
    if family in ("qwen2", "mimo", "deepseek_v3"):
        values.pop("head_dim")
    torch.manual_seed(seed)
    model = model_class(config_class(**values)).eval()
    with torch.no_grad():
        for name, parameter in _tensors(model):
            if name.endswith("e_score_correction_bias"):  # wider than the gaps between scores
                parameter.normal_(0, 0.3)
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:  # biases start at zero: an exporter that forgets them would pass
                parameter.normal_(0, 0.2)
    return model


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that checkpoints hold."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            yield name, buffer


def write_checkpoint(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    edit: Callable[[Any], None] = lambda model: None,
    **overrides: Any,
) -> Path:
    """Write a Hugging Face directory with model, tokenizer and chat template.

    `edit` may change the model first.
    """
    model = make_model(family, seed=seed, **overrides)
    edit(model)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if family == "mimo":
        edit_config(path, architectures=["MiMoForCausalLM"], model_type="mimo")
    write_tokenizer(path)
    return path


def edit_config(path: Path, **values: Any) -> None:
    """Replace keys of a checkpoint's config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def write_tokenizer(path: Path, swapped: tuple[int, int] | None = None) -> None:
    """One token a byte, then <bos> and <eos>; `swapped` exchanges two ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swapped is not None:
        a, b = swapped
        alphabet[a], alphabet[b] = alphabet[b], alphabet[a]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<bos>",
        "eos_token": {"content": "<eos>", "lstrip": False},
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: "
        "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
