"""Small random checkpoints of every family, written by transformers' own classes."""

import json
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
}
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


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random model whose logits are spread enough to be told apart."""
    config_class, model_class = _CLASSES[family]
    values = {**_SIZES, **overrides}
    if family in ("qwen2",):
        values.pop("head_dim")
    torch.manual_seed(seed)
    model = model_class(config_class(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:  # biases start at zero: an exporter that forgets them would pass
                parameter.normal_(0, 0.2)
    return model


def write_checkpoint(
    path: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write a Hugging Face directory with model, tokenizer and chat template."""
    model = make_model(family, seed=seed, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    return path


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
