"""GGUF files: metadata as a Hugging Face config, tensors dequantized one at a time.

The file is read by the `gguf` package. Naming and the rotary permutation of llama-type files are
those of llama.cpp's converter.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Tensor
from specexport.export.decoder import EMBEDDING, LM_HEAD

# GGUF architecture → Hugging Face architecture. Files of type llama hold Mistral models too.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
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
_FLOAT_TYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_FREQUENCY_FACTORS = "rope_freqs.weight"
_TWIN_ROWS = 64
_TWIN_COSINE = 0.98


class GgufCheckpoint:
    """One GGUF file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Read the metadata; raises `CheckpointError` if the file is damaged or unsupported."""
        self.path = path
        self.source = str(path)
        reader = _open(path)
        self.metadata: Mapping[str, Any] = {k: _contents(f) for k, f in reader.fields.items()}
        self._raw = {tensor.name: tensor for tensor in reader.tensors}
        self._arch = str(self.metadata.get("general.architecture"))
        self._require_supported()
        self._tensors = {_hf_name(name): t for name, t in self._raw.items()}
        self._tensors.pop(_FREQUENCY_FACTORS, None)
        self.is_tied = self._resolve_twins()
        self.config = self._make_config()
        self.generation_config = self._make_generation_config()

    def names(self) -> Iterable[str]:
        """Names of all tensors; those without a Hugging Face name keep their own."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def dtype(self, name: str) -> str:
        """fp16 or bf16 where the file has that; quantized tensors are read as fp32."""
        return _FLOAT_TYPES.get(self._tensor(name).tensor_type.name, "fp32")

    def tensor(self, name: str) -> Tensor:
        """Read and dequantize one tensor."""
        values = self._read(self._tensor(name))
        if self._arch == "llama":
            if re.search(r"self_attn\.q_proj", name):
                return _unpermute(values, self.config["num_attention_heads"])
            if re.search(r"self_attn\.k_proj", name):
                return _unpermute(values, self.config["num_key_value_heads"])
        return values

    def write_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer that the metadata describes."""
        from specexport.export.gguf_tokenizer import write_tokenizer

        write_tokenizer(self.metadata, directory)

    def _tensor(self, name: str) -> Any:  # noqa: ANN401 - gguf has no types
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} holds no tensor for {name!r}.")
        return self._tensors[name]

    def _read(self, tensor: Any) -> Tensor:  # noqa: ANN401 - gguf has no types
        from gguf import GGMLQuantizationType, dequantize

        kind = tensor.tensor_type
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if kind == GGMLQuantizationType.BF16:
            import ml_dtypes

            return np.asarray(tensor.data).view(ml_dtypes.bfloat16).reshape(shape)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            return np.asarray(tensor.data).reshape(shape)
        try:
            return np.asarray(dequantize(tensor.data, kind)).reshape(shape)
        except NotImplementedError:
            raise CheckpointError(
                f"{tensor.name} is stored as {kind.name}, which the gguf package cannot "
                "dequantize. Use a file of another type, such as Q8_0, Q4_K_M or F16."
            ) from None

    def _require_supported(self) -> None:
        if self._arch not in _ARCHITECTURES:
            raise CheckpointError(
                f"Unsupported GGUF architecture: {self._arch}. "
                f"Supported: {', '.join(sorted(_ARCHITECTURES))}."
            )
        if self._value("expert_count"):
            raise CheckpointError(
                f"{self.path} is a mixture of {self._value('expert_count')} experts, "
                "which is not supported. Supported: dense llama, qwen2 and qwen3 models."
            )

    def _resolve_twins(self) -> bool:
        """True if the output matrix is the embedding.

        Some files store one tied matrix in two quantizations; the one of more bits is kept.
        """
        output, embedding = self._tensors.get(LM_HEAD), self._tensors.get(EMBEDDING)
        if output is None or embedding is None:
            return True
        if not self._are_twins(output, embedding):
            return False
        self._tensors[EMBEDDING] = max(output, embedding, key=lambda t: int(t.n_bytes))
        del self._tensors[LM_HEAD]
        return True

    def _are_twins(self, a: Any, b: Any) -> bool:  # noqa: ANN401 - gguf has no types
        from gguf import dequantize

        if tuple(a.shape) != tuple(b.shape):
            return False
        step = max(len(a.data) // _TWIN_ROWS, 1)
        x, y = (
            dequantize(t.data[::step], t.tensor_type).ravel().astype(np.float64) for t in (a, b)
        )
        norm = np.linalg.norm(x) * np.linalg.norm(y)
        return bool(norm > 0 and x @ y / norm > _TWIN_COSINE)

    def _value(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - metadata is free
        return self.metadata.get(f"{self._arch}.{key}", default)

    def _make_config(self) -> dict[str, Any]:
        """The metadata in the words of `config.json`."""
        heads = self._value("attention.head_count")
        window = self._value("attention.sliding_window")
        config = {
            "architectures": [_ARCHITECTURES[self._arch]],
            "vocab_size": self.shape(EMBEDDING)[0],
            "hidden_size": self._value("embedding_length"),
            "intermediate_size": self._value("feed_forward_length"),
            "num_hidden_layers": self._value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._value("attention.head_count_kv", heads),
            "max_position_embeddings": self._value("context_length"),
            "rms_norm_eps": self._value("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": self.is_tied,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "head_dim": self._value("attention.key_length", self._value("rope.dimension_count")),
        }
        if self._arch == "llama" and window:
            config["architectures"] = ["MistralForCausalLM"]
            config["sliding_window"] = window
        if config["head_dim"] is None:
            del config["head_dim"]
        return config

    def _rope_parameters(self) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_theta": self._value("rope.freq_base", 10000.0),
            "rope_type": self._value("rope.scaling.type", "default"),
        }
        if rope["rope_type"] == "none":
            rope["rope_type"] = "default"
        keys = {
            "factor": "factor",
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        if rope["rope_type"] == "linear":
            keys = {"factor": "factor"}
        if rope["rope_type"] != "default":
            for key, name in keys.items():
                if (value := self._value(f"rope.scaling.{key}")) is not None:
                    rope[name] = value
        if _FREQUENCY_FACTORS in self._raw:
            rope["frequency_factors"] = self._read(self._raw[_FREQUENCY_FACTORS]).tolist()
        return rope

    def _make_generation_config(self) -> dict[str, Any]:
        prefix = "tokenizer.ggml."
        ids = [self.metadata.get(f"{prefix}{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return {
            "eos_token_id": list(dict.fromkeys(i for i in ids if i is not None)),
            "bos_token_id": self.metadata.get(f"{prefix}bos_token_id"),
        }


def _open(path: Path) -> Any:  # noqa: ANN401 - gguf has no types
    """A reader over a whole file; a cut-off one is refused before anything is read from it."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:  # the package raises whatever the damage leads to
        raise CheckpointError(
            f"{path} is cut off or damaged ({type(error).__name__}: {error}). Download it again."
        ) from None
    needed = max((int(t.data_offset + t.n_bytes) for t in reader.tensors), default=0)
    if (size_bytes := path.stat().st_size) < needed:
        raise CheckpointError(
            f"{path} is cut off: it has {size_bytes} bytes and its tensors need {needed}. "
            "Download it again."
        )
    return reader


def _contents(field: Any) -> Any:  # noqa: ANN401 - gguf has no types
    """A metadata value; an fp32 number as the decimal that was meant (1e-6, not 9.9999999e-7)."""
    from gguf import GGUFValueType

    value = field.contents()
    return float(str(np.float32(value))) if field.types == [GGUFValueType.FLOAT32] else value


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"


def _unpermute(values: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order: it pairs neighbouring rows for RoPE, transformers pairs halves."""
    paired = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)
