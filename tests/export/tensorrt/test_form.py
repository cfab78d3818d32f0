"""The TensorRT form computes the same, breaks no rule and changes nothing on disk."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specexport.export.build import BuildOptions, build
from specexport.export.tensorrt.form import TensorRTForm
from specexport.export.tensorrt.lint import lint
from tests.tensorrt_graphs import CACHE_LENGTH, cache_values, run
from tests.tiny import write_checkpoint


def _form(path: Path) -> ir.Model:
    model = ir.load(path)
    TensorRTForm(CACHE_LENGTH)(model)
    return model


def test_caches_have_a_fixed_length_and_attention_may_be_decomposed(tiny_bundle: Path) -> None:
    model = _form(tiny_bundle / "target/model.onnx")
    caches = cache_values(model)
    assert [list(v.shape or ())[2] for v in caches] == [CACHE_LENGTH] * 8
    marks = [
        n.attributes.get_int("TRT_decomposable", 0) for n in model.graph if n.op_type == "Attention"
    ]
    assert marks == [1, 1]
    assert lint(model) == []


def test_weights_stay_where_they_lie_and_the_file_as_it_is(tiny_bundle: Path) -> None:
    path = tiny_bundle / "target/model.onnx"
    before = path.read_bytes()
    weights = _form(path).graph.initializers["model.norm.weight"].const_value
    assert isinstance(weights, ir.ExternalTensor)
    assert weights.location == "model.weights"
    assert path.read_bytes() == before


@pytest.fixture(scope="module")
def integer_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    source = write_checkpoint(folder / "llama", "llama", intermediate_size=64)
    build(str(source), folder / "bundle", BuildOptions(weight_type="int8", embedding_type="int8"))
    return folder / "bundle"


def test_an_embedding_of_integers_gives_the_same_rows(integer_bundle: Path) -> None:
    path = integer_bundle / "target/model.onnx"
    model = _form(path)
    assert lint(model) == []
    expected, found = (run(m, str(path.parent)) for m in (ir.load(path), model))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
