"""Bundles of integers and fp8: the same model where codes can hold it, and fused kernels."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file

from specexport.engines.ort import OrtFunction, OrtRunner
from specexport.engines.step import Profile
from specexport.errors import ConfigError
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import CodeType, GraphSpec, Manifest, WeightType
from specexport.export.methods import DraftMethod, HeadMethod, MedusaMethod, NoMethod
from specexport.runtime.batch import Batch, Row
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.params import SamplingParams
from tests.heads_tiny import LAYER_CONFIG, Random, layer_weights, write_head
from tests.snap import snap, snap_checkpoint
from tests.tiny import VOCAB_SIZE, make_model, write_checkpoint

IDS = list(range(1, 40))
LENGTH = 64
_MULTIPLY_OUT = "session.disable_quant_qdq"
# fp32 on both sides, as for bundles that are not quantized.
ATOL = 2e-5
# Sizes that are multiples of 32, so that every matrix is quantized.
EVEN: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64},
    "mistral": {"intermediate_size": 64, "attention_bias": True},
    "qwen2": {"hidden_size": 64, "intermediate_size": 64},
    "qwen3": {"intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "deepseek_v3": {
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "v_head_dim": 16,
    },
    "glm4_moe": {"intermediate_size": 64, "moe_intermediate_size": 32},
    "mimo": {"hidden_size": 64, "intermediate_size": 64},
    "ernie4_5": {"intermediate_size": 64},
    "ernie4_5_moe": {  # the output matrix has a bias too
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "use_bias": True,
    },
}


def export(checkpoint: Path, folder: Path, **options: Any) -> Manifest:
    options.setdefault("method", NoMethod())
    manifest = build(str(checkpoint), folder / "bundle", BuildOptions(**options))
    path = folder / "bundle" / manifest.target.path
    onnx.checker.check_model(str(path), full_check=True)
    return manifest


def logits(folder: Path, spec: GraphSpec, *, dequantize: bool) -> Any:
    profile = Profile(max_length=LENGTH, num_threads=1, dequantize=dequantize)
    with OrtRunner(folder / "bundle" / spec.path, spec, profile) as runner:
        return runner.run(Batch.build([Row(0, IDS, len(IDS))], LENGTH).step).logits.copy()


def reference_logits(checkpoint: Path, family: str, **overrides: Any) -> Any:
    """transformers' own model of the files as they are: nothing is quantized here."""
    model = type(make_model(family, **overrides)).from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(torch.tensor([IDS])).logits[0].numpy()


def initializers(folder: Path, path: str = "target/model.onnx") -> dict[str, Any]:
    model = onnx.load(folder / "bundle" / path)
    return {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}


def optimized_operators(
    folder: Path, path: str = "target/model.onnx", entries: Mapping[str, str] = MappingProxyType({})
) -> Counter[str]:
    """What ONNX Runtime makes of a graph when it loads it."""
    options = ort.SessionOptions()
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    options.log_severity_level = 3  # it warns that the file is of this machine alone
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(folder / "bundle" / path, options, providers=["CPUExecutionProvider"])
    model = onnx.load(folder / "optimized.onnx", load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("weight_type", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", EVEN)
def test_weights_that_codes_can_hold_give_the_unquantized_model(
    family: str, weight_type: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **EVEN[family])
    snap_checkpoint(checkpoint, weight_type)
    manifest = export(checkpoint, tmp_path, weight_type=weight_type)
    assert manifest.provenance.notes == ()
    found = logits(tmp_path, manifest.target, dequantize=True)
    expected = reference_logits(checkpoint, family, **EVEN[family])
    np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.parametrize("weight_type", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_every_product_becomes_one_with_integer_weights(
    family: str, weight_type: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **EVEN[family])
    spec = export(checkpoint, tmp_path, weight_type=weight_type).target
    model = onnx.load(tmp_path / "bundle" / spec.path, load_external_data=False)
    products = Counter(node.op_type for node in model.graph.node)["DequantizeLinear"]
    assert products >= 2 * 7 + 1
    operators = optimized_operators(tmp_path)
    assert operators["MatMulNBits"] == products
    assert operators["DequantizeLinear"] == operators["Gemm"] == 0


@pytest.mark.parametrize("weight_type", ["int8", "int4"])
def test_integer_kernels_stay_near_the_exact_product(weight_type: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    spec = export(checkpoint, tmp_path, weight_type=weight_type).target
    exact = logits(tmp_path, spec, dequantize=True)
    found = logits(tmp_path, spec, dequantize=False)
    # Activations of 8 bits: an error of 0.4 % of the largest in each product, logits of about 1.2.
    assert 0 < np.abs(found - exact).mean() < 0.1


@pytest.mark.parametrize("types", [{"weight_type": "fp8"}, {"embedding_type": "fp8"}])
def test_fp8_is_multiplied_out_once_on_a_cpu(
    types: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    spec = export(checkpoint, tmp_path, **types).target
    assert spec.computes_in_fp32
    expected = logits(tmp_path, spec, dequantize=True)
    opened, open_session = [], ort.InferenceSession

    def record(path: str, options: ort.SessionOptions, **rest: Any) -> ort.InferenceSession:
        opened.append(options.get_session_config_entry(_MULTIPLY_OUT))
        return open_session(path, options, **rest)

    monkeypatch.setattr(ort, "InferenceSession", record)
    np.testing.assert_array_equal(logits(tmp_path, spec, dequantize=False), expected)
    assert opened == ["1"]
    # Without it ONNX Runtime would do so in every step.
    monkeypatch.undo()
    assert optimized_operators(tmp_path)["DequantizeLinear"] > 0
    assert optimized_operators(tmp_path, entries={_MULTIPLY_OUT: "1"})["DequantizeLinear"] == 0


@pytest.mark.parametrize("tied", [False, True])
def test_only_standard_operators_and_the_chosen_types_are_used(tied: bool, tmp_path: Path) -> None:
    sizes = {**EVEN["llama"], "tie_word_embeddings": tied}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **sizes)
    manifest = export(checkpoint, tmp_path, weight_type="int4")
    spec = manifest.target
    types = (spec.weight_type, spec.lm_head_type, spec.embedding_type, spec.is_rounded)
    assert types == ("int4", "int8", "fp32", True)
    assert spec.stored_as == "int4, lm_head int8, embedding fp32"
    model = onnx.load(tmp_path / "bundle" / spec.path, load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
    assert {node.domain for node in model.graph.node} == {""}
    found = {i.name: onnx.TensorProto.DataType.Name(i.data_type) for i in model.graph.initializer}
    output = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert found["model.layers.0.mlp.up_proj.weight.int4"] == "INT4"
    assert found[f"{output}.int8"] == "INT8"
    assert found["model.embed_tokens.weight"] == "FLOAT"
    assert found["model.norm.weight"] == "FLOAT"
    assert "lm_head.weight" not in found
    assert "model.layers.0.mlp.up_proj.weight" not in found
    assert sum(p.numel() for p in make_model("llama", **sizes).parameters()) == spec.num_parameters


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("types", "stored_as"),
    [
        ({"weight_type": "int8", "embedding_type": "int8"}, "int8"),
        ({"embedding_type": "int8"}, "fp32, embedding int8"),
        ({"lm_head_type": "int8"}, "fp32, lm_head int8"),
        ({"weight_type": "int8", "lm_head_type": "fp32"}, "int8, lm_head fp32, embedding fp32"),
        ({"lm_head_type": "fp16", "embedding_type": "bf16"}, "fp32, lm_head fp16, embedding bf16"),
        ({"weight_type": "bf16", "lm_head_type": "fp32"}, "bf16, lm_head fp32"),
        ({"weight_type": "fp8", "embedding_type": "fp8"}, "fp8"),
        ({"embedding_type": "fp8"}, "fp32, embedding fp8"),
    ],
)
def test_output_matrix_and_embedding_have_types_of_their_own(
    types: dict[str, Any], stored_as: str, tied: bool, tmp_path: Path
) -> None:
    sizes = {**EVEN["llama"], "tie_word_embeddings": tied}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **sizes)
    # 127 * 2^n and its multiples have 7 bits: they fit bf16 and fp16 as well.
    snap_checkpoint(checkpoint, "fp8" if "fp8" in types.values() else "int8")
    manifest = export(checkpoint, tmp_path, **types)
    assert manifest.target.stored_as == stored_as
    found = logits(tmp_path, manifest.target, dequantize=True)
    expected = reference_logits(checkpoint, "llama", **sizes)
    np.testing.assert_allclose(found, expected, atol=ATOL)


def test_ragged_matrices_stay_as_they_are_with_a_note(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")  # down_proj is [32, 48]
    manifest = export(checkpoint, tmp_path, weight_type="int4")
    (note,) = manifest.provenance.notes
    assert note == (
        "target: 2 matrices stay fp32, because their input size is no multiple of 32 (first "
        "model.layers.0.mlp.down_proj.weight [32, 48])."
    )
    found = initializers(tmp_path)
    assert found["model.layers.0.mlp.down_proj.weight"].shape == (48, 32)
    assert found["model.layers.0.mlp.up_proj.weight.int4"].shape == (32, 48)


def test_a_ragged_output_matrix_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **sizes)
    spec = export(checkpoint, tmp_path, weight_type="int8", embedding_type="int8").target
    assert spec.stored_as == "int8, lm_head fp32, embedding fp32"
    assert np.isfinite(logits(tmp_path, spec, dequantize=False)).all()


def test_a_bf16_checkpoint_keeps_what_is_not_quantized_in_bf16(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    model_class = type(make_model("llama"))
    model_class.from_pretrained(tmp_path / "checkpoint", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "checkpoint"
    )
    snap_checkpoint(tmp_path / "checkpoint", "int8")
    spec = export(tmp_path / "checkpoint", tmp_path, weight_type="int8").target
    assert spec.stored_as == "int8, embedding bf16"
    found = logits(tmp_path, spec, dequantize=True)
    expected = reference_logits(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.parametrize("weight_type", ["int8", "int4", "fp8"])
def test_the_codes_are_in_the_order_that_onnx_reads(
    weight_type: WeightType, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    snap_checkpoint(checkpoint, weight_type)
    export(checkpoint, tmp_path, weight_type=weight_type)
    stored = load_file(checkpoint / "model.safetensors")
    found = initializers(tmp_path)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        codes = found[f"{name}.{weight_type}"].astype(np.float32)  # [I, O]
        scales = found[f"{name}.{weight_type}.scales"]  # [I / 32, O]
        np.testing.assert_array_equal(codes * np.repeat(scales, 32, axis=0), stored[name].numpy().T)


def greedy(bundle: Path, method: Any = None) -> list[int]:
    with Engine(bundle, EngineOptions(method=method, num_threads=1)) as engine:
        result = engine.submit("to be or not to be", SamplingParams(max_tokens=24)).result()
        return list(result.token_ids)


def test_a_draft_model_has_a_type_of_its_own_and_changes_no_output(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    manifest = export(
        checkpoint,
        tmp_path,
        method=DraftMethod(),
        draft=str(checkpoint),
        draft_weight_type="int4",
    )
    assert manifest.draft is not None
    assert manifest.target.stored_as == "fp32"
    assert manifest.draft.stored_as == "int4, lm_head int8, embedding fp32"
    # The target computes in fp32, so speculation is exact whatever the draft model is.
    assert greedy(tmp_path / "bundle") == greedy(tmp_path / "bundle", "none")


def test_a_draft_model_is_stored_like_its_target_unless_told_otherwise(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    manifest = export(
        checkpoint, tmp_path, method=DraftMethod(), draft=str(checkpoint), weight_type="int8"
    )
    assert manifest.draft is not None
    assert manifest.draft.stored_as == manifest.target.stored_as == "int8, embedding fp32"


def test_speculation_over_fp8_is_exact(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **EVEN["llama"])
    manifest = export(
        checkpoint,
        tmp_path,
        method=DraftMethod(),
        draft=str(checkpoint),
        weight_type="fp8",
        draft_weight_type="int4",
    )
    assert manifest.draft is not None
    assert manifest.target.stored_as == "fp8, embedding fp32"
    assert manifest.draft.stored_as == "int4, lm_head int8, embedding fp32"
    assert greedy(tmp_path / "bundle") == greedy(tmp_path / "bundle", "none")


def medusa_tensors(code_type: str) -> dict[str, torch.Tensor]:
    """Three heads of one block, which use the target's output matrix."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"blocks.{i}.layers.0.weight": snap(
            torch.randn(32, 32, generator=generator) * 0.2, code_type
        )
        for i in range(3)
    }


def write_medusa(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("target_type", "draft_type", "num_fused"),
    [("int8", None, 4), ("int8", "fp32", 1), ("fp32", "int8", 3), ("fp8", None, 0)],
)
def test_heads_read_the_targets_output_matrix_as_the_target_stores_it(
    target_type: WeightType,
    draft_type: WeightType | None,
    num_fused: int,
    tied: bool,
    tmp_path: Path,
) -> None:
    sizes = {**EVEN["llama"], "tie_word_embeddings": tied}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", **sizes)
    code_type = "fp8" if target_type == "fp8" else "int8"
    snap_checkpoint(checkpoint, code_type)
    tensors = medusa_tensors(code_type)
    head = write_medusa(tmp_path / "head", {"original_lm_head": True}, tensors)
    manifest = export(
        checkpoint,
        tmp_path,
        method=MedusaMethod(),
        head=str(head),
        weight_type=target_type,
        draft_weight_type=draft_type,
    )
    assert manifest.head is not None
    assert manifest.head.medusa is not None
    assert manifest.head.medusa.lm_head_type == target_type
    path = manifest.head.medusa.path
    model = onnx.load(tmp_path / "bundle" / path, load_external_data=False)
    places = {
        i.name: {entry.key: entry.value for entry in i.external_data}["location"]
        for i in model.graph.initializer
        if VOCAB_SIZE in i.dims
    }
    output = "model.embed_tokens.weight" if tied else "lm_head.weight"
    codes = f"{output}.{target_type}"
    wanted = [output] if target_type == "fp32" else [codes, f"{codes}.scales"]
    assert places == dict.fromkeys(wanted, "model.weights")
    # One product for all heads: integer kernels are used by a matrix that is read once.
    entries = {_MULTIPLY_OUT: "1"} if target_type == "fp8" else {}
    operators = optimized_operators(tmp_path, path, entries)
    assert operators["MatMulNBits"] == num_fused
    assert operators["DequantizeLinear"] == 0

    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    found = OrtFunction(tmp_path / "bundle" / path, 1, dequantize=True).run(hidden.numpy())
    stored = load_file(checkpoint / "model.safetensors")
    matrix = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
    expected = [
        (hidden + torch.nn.functional.silu(hidden @ weight.T)) @ matrix.T
        for weight in tensors.values()
    ]
    np.testing.assert_allclose(found, torch.stack(expected, dim=1).numpy(), atol=ATOL)


def eagle_tensors(method: str, code_type: str) -> dict[str, torch.Tensor]:
    """A head of one layer; the one of EAGLE-3 has an embedding and an output matrix of its own."""
    random = Random()
    if method == "eagle":
        tensors = {"fc.weight": random.matrix(32, 64), **layer_weights(random, "layers.0")}
    else:
        layer = layer_weights(random, "midlayer", input_size=64)
        norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
        tensors = {
            "fc.weight": random.matrix(32, 3 * 32),
            "embed_tokens.weight": random.matrix(VOCAB_SIZE, 32),
            "lm_head.weight": random.matrix(VOCAB_SIZE, 32),
            **{f"{name}.weight": random.norm(32) for name in norms},
            **layer,
        }
    return {name: snap(tensor, code_type) for name, tensor in tensors.items()}


@pytest.mark.parametrize("code_type", ["int8", "fp8"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_quantized_head_is_the_same_head_where_codes_can_hold_it(
    method: Literal["eagle", "eagle3"], code_type: CodeType, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=8)
    snap_checkpoint(checkpoint, code_type)
    config = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLM"]}
    if method == "eagle3":
        config["draft_vocab_size"] = VOCAB_SIZE
    head = write_head(tmp_path / "head", config, eagle_tensors(method, code_type))
    found = {}
    for weight_type in ("fp32", code_type):
        (tmp_path / weight_type).mkdir()
        manifest = export(
            checkpoint,
            tmp_path / weight_type,
            method=HeadMethod(kind=method),
            head=str(head),
            weight_type=weight_type,
            embedding_type=weight_type,
        )
        assert manifest.head is not None
        spec = manifest.head.step
        assert spec is not None
        assert spec.stored_as == weight_type
        bundle = tmp_path / weight_type / "bundle"
        step = Batch.build([Row(0, IDS[:8], 8)], LENGTH).step
        features = np.random.default_rng(0).normal(size=(1, 8, 32)).astype(np.float32)
        if manifest.head.fuse is not None:
            taps = np.random.default_rng(1).normal(size=(8, 96)).astype(np.float32)
            fuse = OrtFunction(bundle / manifest.head.fuse.path, 1, dequantize=True)
            features = fuse.run(taps)[None]
        profile = Profile(max_length=LENGTH, num_threads=1, dequantize=True)
        with OrtRunner(bundle / spec.path, spec, profile) as runner:
            found[weight_type] = runner.run(replace(step, hidden_states=features)).logits.copy()
    # The fp32 head equals the paper's equation (tests/export/heads).
    np.testing.assert_allclose(found[code_type], found["fp32"], atol=ATOL)
    assert greedy(tmp_path / code_type / "bundle")  # and it runs


def test_int4_embeddings_and_weights_of_no_drafter_are_refused() -> None:
    with pytest.raises(ConfigError, match="embedding cannot be stored as int4"):
        BuildOptions(embedding_type="int4")
    with pytest.raises(ConfigError, match="--draft-weights has no meaning for method ngram"):
        BuildOptions(draft_weight_type="int8")
