"""GGUF files as checkpoints: tensors under their Hugging Face names, dequantized one at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Tensor
from specexport.export.finite import require_finite
from specexport.export.gguf_config import Settings, make_config
from specexport.export.gguf_file import StoredTensor, are_twins, open_gguf
from specexport.export.gguf_tokenizer import special_token_id, write_tokenizer

_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    """One whole GGUF file of a `llama`, `qwen2` or `qwen3` model, memory-mapped.

    `notes` says in sentences what was decided about the file, for the user to read.
    """

    def __init__(self, path: Path) -> None:
        """Read the header; raises `CheckpointError` if the file is cut off or unsupported."""
        self.path = path
        self.source = str(path)
        self.notes: list[str] = []
        self._metadata, stored = open_gguf(path)
        self._tensors = {_rename(name): tensor for name, tensor in stored.items()}
        factors = self._tensors.pop("rope_freqs.weight", None)
        settings = Settings.of(self._metadata, path)
        tied = self._tie()
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.config = make_config(settings, shapes, tied=tied)
        if factors is not None:
            self.config["rope_parameters"] |= _frequency_factors(factors.read())
        self.generation_config = _generation_config(self._metadata)
        self._permuted_heads = _permuted_heads(self.config)

    def names(self) -> Iterable[str]:
        """Names of all tensors; one without a Hugging Face name keeps its GGUF name."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """Type that `tensor` returns: that of the file, fp32 for quantized tensors."""
        return self._find(name).dtype

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, dequantized and in Hugging Face's order of rows."""
        tensor = require_finite(self._find(name).read(), f"{self.source}: {name}")
        num_heads = next((n for part, n in self._permuted_heads.items() if part in name), None)
        return tensor if num_heads is None else _unpermute(tensor, num_heads, name)

    def write_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json (with the chat template)."""
        write_tokenizer(self._metadata, self.source, directory)

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.path} holds no tensor {name!r}. Is it a whole file of this model?"
            )
        return self._tensors[name]

    def _tie(self) -> bool:
        """Decide whether output and embedding are one matrix; keep its better quantization."""
        embedding = self._tensors.get("model.embed_tokens.weight")
        output = self._tensors.get("lm_head.weight")
        if embedding is None or output is None:
            return output is None
        if not are_twins(embedding, output):
            return False
        worse, better = sorted((output, embedding), key=lambda t: t.bits_per_weight)
        self._tensors["model.embed_tokens.weight"] = better
        del self._tensors["lm_head.weight"]
        self.notes.append(
            f"{worse.name} ({worse.kind.name}) and {better.name} ({better.kind.name}) are one "
            f"tied matrix stored twice: {better.name} is used for both."
        )
        return True


def _rename(name: str) -> str:
    """GGUF name → Hugging Face name; an unknown name stays."""
    match name.split("."):
        case ["blk", layer, part, suffix] if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{suffix}"
    return _MODEL_TENSORS.get(name, name)


def _permuted_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Parts of names of the tensors stored permuted → number of heads."""
    if config["model_type"] not in ("llama", "mistral"):
        return {}
    return {
        ".self_attn.q_proj.": config["num_attention_heads"],
        ".self_attn.k_proj.": config["num_key_value_heads"],
    }


def _unpermute(tensor: Tensor, num_heads: int, name: str) -> Tensor:
    """Undo llama.cpp's order of rows, which pairs row i of a head with row i + head_dim / 2.

    [heads * head_dim, …] → the same shape; within a head 0, 1, 2, 3 … → 0, 2, 4 …, 1, 3, 5 ….
    """
    if len(tensor) % (2 * num_heads):
        raise CheckpointError(
            f"{name} has {len(tensor)} rows; expected pairs for {num_heads} heads."
        )
    paired = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(tensor.shape)


def _frequency_factors(factors: Tensor) -> dict[str, list[float]]:
    """Llama 3.x's divisors of the rotary frequencies.  # [head_dim / 2]."""
    return {} if (factors == 1).all() else {"frequency_factors": factors.tolist()}


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """End of sequence, of turn and of message all end a generation."""
    ends = [special_token_id(metadata, role) for role in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(i for i in ends if i is not None))}
    if (bos := special_token_id(metadata, "bos")) is not None:
        config["bos_token_id"] = bos
    return config
