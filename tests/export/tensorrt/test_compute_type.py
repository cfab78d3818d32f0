"""The pass to fp16 and bf16: what is computed in which type, and that it is the same function."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from specexport.export.build import BuildOptions, build
from specexport.export.manifest import FloatType
from specexport.export.tensorrt.compute_type import ComputeType
from specexport.export.tensorrt.form import TensorRTForm
from specexport.export.tensorrt.lint import lint
from tests.tensorrt_graphs import CACHE_LENGTH, cache_values, run
from tests.tiny import write_checkpoint

TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def _form(path: Path, compute_type: str) -> ir.Model:
    model = ir.load(path)
    TensorRTForm(CACHE_LENGTH)(model)
    if compute_type != "fp32":
        ComputeType(compute_type)(model)  # type: ignore[arg-type]
    return model


def _bundle(folder: Path, family: str, weight_type: FloatType | None = None) -> Path:
    source = write_checkpoint(folder / "checkpoint", family)
    build(str(source), folder / "bundle", BuildOptions(weight_type=weight_type))
    return folder / "bundle/target/model.onnx"


@pytest.mark.parametrize("compute_type", TYPES)
def test_products_attention_and_caches_have_the_type(tiny_bundle: Path, compute_type: str) -> None:
    model = _form(tiny_bundle / "target/model.onnx", compute_type)
    wanted = TYPES[compute_type]
    for node in model.graph:
        if node.op_type in ("MatMul", "Gemm", "Attention", "TensorScatter"):
            floats = [v for v in node.inputs if v is not None and v.dtype in _floats()]
            assert {v.dtype for v in (*floats, *node.outputs)} == {wanted}, node.name
    caches = cache_values(model)
    assert {v.dtype for v in caches} == {wanted}


@pytest.mark.parametrize("compute_type", TYPES)
def test_residual_stream_norms_and_logits_stay_fp32(tiny_bundle: Path, compute_type: str) -> None:
    model = _form(tiny_bundle / "target/model.onnx", compute_type)
    for node in model.graph:
        if node.op_type in ("Add", "Mul", "Sigmoid", "RMSNormalization", "RotaryEmbedding"):
            floats = [v for v in node.inputs if v is not None and v.dtype in _floats()]
            assert {v.dtype for v in (*floats, *node.outputs)} == {ir.DataType.FLOAT}, node.name
    (logits,) = [value for value in model.graph.outputs if value.name == "logits"]
    assert logits.dtype == ir.DataType.FLOAT


def _floats() -> set[ir.DataType]:
    return {ir.DataType.FLOAT, *TYPES.values()}


@pytest.mark.parametrize("compute_type", TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "ernie4_5_moe"])
def test_the_graph_is_valid_and_breaks_no_rule(
    family: str, compute_type: str, tmp_path: Path
) -> None:
    model = _form(_bundle(tmp_path, family), compute_type)
    assert lint(model) == []
    for node in model.graph:
        node.attributes.pop("TRT_decomposable", None)
    onnx.save(ir.to_proto(model), tmp_path / "bundle/target/checked.onnx")
    onnx.checker.check_model(str(tmp_path / "bundle/target/checked.onnx"), full_check=True)


@pytest.mark.parametrize("weight_type", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_fp16_computes_the_same_within_its_precision(
    family: str, weight_type: FloatType, tmp_path: Path
) -> None:
    """Of ten bits of fraction; bf16 has no kernels on a CPU, and differs only in the type."""
    path = _bundle(tmp_path, family, weight_type)
    expected, found = (run(_form(path, t), str(path.parent)) for t in ("fp32", "fp16"))
    scale = np.abs(expected["logits"]).max()
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=0.01 * scale)
    assert found["present.0.key"].dtype == np.float16


def test_routers_choose_experts_in_fp32(tmp_path: Path) -> None:
    model = _form(_bundle(tmp_path, "qwen3_moe"), "fp16")
    names = ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight")
    routers = [use.node for name in names for use in model.graph.initializers[name].uses()]
    assert [node.op_type for node in routers] == ["MatMul"] * 2
    for node in routers:
        assert {value.dtype for value in (*node.inputs, *node.outputs) if value} == {
            ir.DataType.FLOAT
        }


def test_a_weight_stored_in_the_type_is_read_without_a_cast(tmp_path: Path) -> None:
    model = _form(_bundle(tmp_path, "llama", "bf16"), "bf16")
    for node in model.graph:
        if node.op_type == "MatMul":
            assert node.inputs[1] is not None
            assert node.inputs[1].is_initializer()
