"""GGUF files against transformers' own reading of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from specexport.errors import CheckpointError
from specexport.export.checkpoint import open_checkpoint
from specexport.export.families import read_config
from specexport.export.gguf_checkpoint import GgufCheckpoint
from tests.tiny import make_model

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def _gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):
        name = name.replace(ours, theirs)
    return name


def _permute(weight: Any, num_heads: int) -> Any:
    """As llama.cpp's converter stores q and k of llama-type models."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    arch: str,
    *,
    metadata: dict[str, Any] | None = None,
    quantized: bool = False,
    twins: bool = False,
    extra: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Write a random model as llama.cpp's converter would; returns transformers' model."""
    model = make_model(arch, **{**SIZES, **overrides})
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch != "qwen2":
        writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(257)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 258)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key, value)
    tensors = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    if twins:
        noise = np.random.default_rng(0).normal(0, 1e-3, tensors["lm_head.weight"].shape)
        tensors["model.embed_tokens.weight"] = (tensors["lm_head.weight"] + noise).astype(
            np.float32
        )
    for name, value in tensors.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        projection = name.split(".")[-2]
        stored = value
        if arch == "llama" and projection in heads:
            stored = _permute(value, heads[projection])
        half = name == "model.embed_tokens.weight" and twins
        if half or (quantized and stored.ndim == 2):
            kind = GGMLQuantizationType.Q4_0 if half else GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), stored)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ],
)
def test_tensors_and_config_are_those_of_the_model(
    arch: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = write_gguf(tmp_path / "model.gguf", arch, **overrides)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    expected = {name: p.detach().numpy() for name, p in model.named_parameters()}
    assert set(checkpoint.names()) == set(expected)
    for name, value in expected.items():
        assert checkpoint.shape(name) == value.shape
        np.testing.assert_array_equal(checkpoint.tensor(name), value)
    found, wanted = read_config(checkpoint.config), read_config(model.config.to_dict())
    assert found == wanted
    assert checkpoint.generation_config["eos_token_id"] == [257, 258]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_quantized_tensors_equal_transformers_dequantization(arch: str, tmp_path: Path) -> None:
    # transformers reads no head_dim from qwen3 files: 128 is its default.
    write_gguf(
        tmp_path / "model.gguf", arch, quantized=True, head_dim=128 if arch == "qwen3" else 16
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    for name, value in reference.named_parameters():
        np.testing.assert_array_equal(checkpoint.tensor(name), value.detach().numpy())


def test_two_quantizations_of_one_tied_matrix_are_one(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", "qwen2", twins=True)
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.names()
    better = model.lm_head.weight.detach().numpy()
    np.testing.assert_array_equal(checkpoint.tensor("model.embed_tokens.weight"), better)


def test_mistral_is_recognised_by_its_window(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", metadata={"llama.attention.sliding_window": 8})
    config = read_config(GgufCheckpoint(tmp_path / "m.gguf").config)
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 8)


def test_rope_scaling_and_frequency_factors_are_read(tmp_path: Path) -> None:
    metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 64,
    }
    write_gguf(tmp_path / "yarn.gguf", "qwen3", metadata=metadata)
    rope = read_config(GgufCheckpoint(tmp_path / "yarn.gguf").config).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    write_gguf(tmp_path / "factors.gguf", "llama", extra=factors)
    checkpoint = GgufCheckpoint(tmp_path / "factors.gguf")
    assert read_config(checkpoint.config).rope.frequency_factors == tuple(range(1, 9))
    assert "rope_freqs.weight" not in checkpoint.names()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
def test_a_cut_off_file_is_an_error(share: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(CheckpointError, match="cut off"):
        open_checkpoint(path)


def test_other_files_and_models_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        open_checkpoint(tmp_path / "model.bin")
    writer = GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"gemma3\. Supported: llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "other.gguf")
    write_gguf(tmp_path / "moe.gguf", "llama", metadata={"llama.expert_count": 8})
    with pytest.raises(CheckpointError, match="mixture of 8 experts"):
        open_checkpoint(tmp_path / "moe.gguf")


@pytest.mark.model
def test_smollm2_equals_transformers_reading_of_it(smollm2_gguf: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    checkpoint = open_checkpoint(smollm2_gguf)
    # transformers keeps the fp32 number's long decimals; nothing else may differ.
    config = {**reference.config.to_dict(), "quantization_config": None, "rms_norm_eps": 1e-5}
    assert read_config(checkpoint.config) == read_config(config)
    expected = dict(reference.named_parameters())
    assert set(checkpoint.names()) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), value.detach().numpy())
