"""Exported graphs against transformers' own models: logits through the cache, every family."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import DynamicCache

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile
from specexport.export.build import BuildOptions, build
from specexport.export.methods import NoMethod
from specexport.runtime.batch import Batch, Row
from tests.tiny import VOCAB_SIZE, make_model, write_checkpoint

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
MLA_YARN = {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window 8": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"hidden_size": 64}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2, all layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biases, wide heads": ("qwen3", {"attention_bias": True, "head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, one plain layer, unnormalised": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "qwen3_moe, every second layer, windowed": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8},
    ),
    "deepseek_v3": ("deepseek_v3", {"rms_norm_eps": 1e-3}),
    "deepseek_v3, yarn, unranked queries, biases": (
        "deepseek_v3",
        {
            "rope_parameters": MLA_YARN,
            "q_lora_rank": None,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,  # the latents keep their own
        },
    ),
    "deepseek_v3, halves rotated, no groups, unnormalised": (
        "deepseek_v3",
        {"rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, biases, no qk norm, two shared": (
        "glm4_moe",
        {"attention_bias": True, "use_qk_norm": False, "n_shared_experts": 2},
    ),
    "mimo": ("mimo", {"hidden_size": 64}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5, biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe, biases, every second layer": (
        "ernie4_5_moe",
        {"use_bias": True, "moe_layer_interval": 2, "moe_layer_start_index": 0},
    ),
}  # fmt: skip
# fp32 on both sides; logits have a standard deviation near 1. The sums differ in order only.
ATOL = 2e-5


def load(checkpoint: Path, folder: Path, **profile: Any) -> OrtRunner:
    manifest = build(str(checkpoint), folder / "bundle", BuildOptions(method=NoMethod()))
    graph = folder / "bundle" / manifest.target.path
    onnx.checker.check_model(str(graph), full_check=True)
    return OrtRunner(graph, manifest.target, Profile(**{"max_length": 128, **profile}))


def reference_logits(family: str, overrides: dict[str, Any], ids: list[int]) -> Any:
    with torch.inference_mode():
        return make_model(family, **overrides)(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_chunks_and_ragged_batches(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **overrides)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (40, 23, 31)]
    found: list[list[Any]] = [[], [], []]
    done = [0, 0, 0]
    with load(checkpoint, tmp_path, max_slots=3) as runner:
        for sizes in ((7, 1, 3), (1, 5, 1), (8, 2, 9), (9, 15, 16), (15, 0, 2)):
            rows = [
                Row(done[b], texts[b][done[b] : done[b] + n], n) if n else Row.idle(128)
                for b, n in enumerate(sizes)
            ]
            batch = Batch.build(rows, 128, runner.spec.sliding_window)
            logits = runner.run(batch.step).logits
            for b, n in enumerate(sizes):
                found[b].append(logits[batch.logits_start[b] :][:n].copy())
                done[b] += n
    assert done == [len(text) for text in texts]
    for text, parts in zip(texts, found, strict=True):
        expected = reference_logits(family, overrides, text)
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=ATOL)


def test_dynamic_rope_equals_transformers_decoding_past_the_original_context(
    tmp_path: Path,
) -> None:
    overrides: dict[str, Any] = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    }
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **overrides)
    model = make_model("llama", **overrides)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 100).tolist()
    with torch.inference_mode():
        cache = DynamicCache()
        expected = [model(torch.tensor([ids[:50]]), cache=cache).logits[0].numpy()]
        for i in range(50, 100):
            output = model(torch.tensor([[ids[i]]]), cache=cache)
            expected.append(output.logits[0].numpy())
    options = BuildOptions(method=NoMethod(), max_length=100)
    manifest = build(str(checkpoint), tmp_path / "bundle", options)
    runner = OrtRunner(
        tmp_path / "bundle" / manifest.target.path, manifest.target, Profile(max_length=100)
    )
    with runner:
        parts = []
        for start, end in ((0, 30), (30, 70), (70, 100)):
            batch = Batch.build([Row(start, ids[start:end], end - start)], 100)
            parts.append(runner.run(batch.step).logits.copy())
    np.testing.assert_allclose(np.concatenate(parts), np.concatenate(expected), atol=5e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "ernie4_5_moe"])
@pytest.mark.parametrize(
    ("weight_type", "torch_type"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_rounded_weights_equal_a_model_with_the_same_rounding(
    weight_type: Any, torch_type: torch.dtype, family: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, tie_word_embeddings=True)
    options = BuildOptions(method=NoMethod(), weight_type=weight_type)
    manifest = build(str(checkpoint), tmp_path / "bundle", options)
    assert manifest.target.is_rounded
    model = make_model(family, tie_word_embeddings=True)
    routers = ("mlp.gate.weight", "e_score_correction_bias")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith(routers):  # nor are vectors rounded
                parameter.copy_(parameter.to(torch_type).float())
    ids = list(range(1, 30))
    with OrtRunner(
        tmp_path / "bundle" / manifest.target.path, manifest.target, Profile(max_length=64)
    ) as runner:
        found = runner.run(Batch.build([Row(0, ids, len(ids))], 64).step).logits
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_bf16_checkpoint_keeps_its_type_and_loses_nothing(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", family)
    # Routers stay fp32, as transformers keeps them.
    type(make_model(family)).from_pretrained(
        tmp_path / "checkpoint", dtype=torch.bfloat16
    ).save_pretrained(tmp_path / "checkpoint")
    with load(tmp_path / "checkpoint", tmp_path) as runner:
        assert (runner.spec.weight_type, runner.spec.is_rounded) == ("bf16", False)
        ids = list(range(1, 30))
        found = runner.run(Batch.build([Row(0, ids, len(ids))], 64).step).logits.copy()
    # Read back in fp32, as a user would: a bf16 module also rounds its rotary frequencies.
    model_class = type(make_model(family))
    reference = model_class.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=ATOL)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", tie_word_embeddings=True)
    manifest = build(str(checkpoint), tmp_path / "bundle", BuildOptions(method=NoMethod()))
    model = onnx.load(tmp_path / "bundle" / manifest.target.path, load_external_data=False)
    big = [i.name for i in model.graph.initializer if VOCAB_SIZE in i.dims]
    assert big == ["model.embed_tokens.weight"]


def test_all_weights_are_external_and_shards_are_read(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3", max_shard_size="40KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    manifest = build(str(checkpoint), tmp_path / "bundle", BuildOptions(method=NoMethod()))
    model = onnx.load(tmp_path / "bundle" / manifest.target.path, load_external_data=False)
    inline = [
        i.name for i in model.graph.initializer if i.data_location != onnx.TensorProto.EXTERNAL
    ]
    assert all(name.startswith("const_") for name in inline)
    assert {
        entry.value
        for i in model.graph.initializer
        for entry in i.external_data
        if entry.key == "location"
    } == {"model.weights"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_only_standard_operators_of_opset_24_are_used(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family)
    manifest = build(str(checkpoint), tmp_path / "bundle", BuildOptions(method=NoMethod()))
    model = onnx.load(tmp_path / "bundle" / manifest.target.path, load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
    assert {node.domain for node in model.graph.node} == {""}
    operators = {node.op_type for node in model.graph.node}
    assert {"TensorScatter", "Attention", "RotaryEmbedding", "RMSNormalization"} <= operators
    for node in model.graph.node:
        if node.op_type == "Attention":  # TensorRT: no input 6, no is_causal beside a mask
            assert len(node.input) == 4
            assert not {a.name for a in node.attribute} & {"is_causal"}
    # TensorRT knows none of these.
    assert not operators & {"NonZero", "Unique", "Compress"}


def test_latent_attention_caches_one_small_tensor_a_layer(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "deepseek_v3")
    spec = build(str(checkpoint), tmp_path / "bundle", BuildOptions(method=NoMethod())).target
    caches = [i for i in spec.inputs if i.name.startswith("past_key_values")]
    assert [c.name for c in caches] == [f"past_key_values.{i}.key" for i in range(3)]
    assert {c.shape for c in caches} == {("batch", 1, "cache_length", 24 + 8)}  # latent, rotary key
    model = onnx.load(tmp_path / "bundle" / spec.path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Attention":
            assert node.input[1] == node.input[2]
    # The up-projections are cut when written; no node is left to cut them.
    assert not [i.name for i in model.graph.initializer if "kv_b_proj" in i.name]
