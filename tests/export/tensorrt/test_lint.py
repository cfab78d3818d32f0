"""Each rule of the lint on a graph that breaks it alone, and on a graph that specexport writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from specexport.export.tensorrt.lint import RULES, lint
from tests.tensorrt_graphs import takes

HALF, FLOAT, INT64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT64
CACHE = (2, 1, 32, 8)

Shape = Sequence[int | str]


def _value(name: str, dtype: int, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, Any] | None = None,
) -> ir.Model:
    tensors = [numpy_helper.from_array(v, name) for name, v in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), tensors)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=11))


def _findings(model: ir.Model) -> list[str]:
    return [str(finding) for finding in lint(model)]


def _one(model: ir.Model, *, is_taken: bool = False) -> str:
    """The only finding. Where TensorRT-RTX is installed, it must refuse the graph too."""
    (finding,) = _findings(model)
    assert takes(model) in (is_taken, None)
    return finding


def _attention(
    extra: Sequence[str] = ("mask",),
    outputs: Sequence[str] = ("y",),
    dtype: int = HALF,
    width: int = 8,
    value_width: int | None = None,
    **attributes: Any,
) -> ir.Model:
    """Q queries over T keys and values, whatever these are, and the inputs named in `extra`."""
    attributes = {"TRT_decomposable": 1, **attributes}
    value_width = value_width or width
    kinds = {
        "mask": _value("mask", TensorProto.BOOL, ("B", 1, "Q", "T")),
        "past_key": _value("past_key", dtype, ("B", 2, "P", 8)),
        "past_value": _value("past_value", dtype, ("B", 2, "P", 8)),
        "lengths": _value("lengths", INT64, (2,)),
    }
    node = helper.make_node("Attention", ["q", "k", "v", *extra], outputs, "attend", **attributes)
    inputs = [
        _value("q", dtype, ("B", 4, "Q", width)),
        _value("k", dtype, ("B", 2, "T", width)),
        _value("v", dtype, ("B", 2, "T", value_width)),
    ]
    inputs += [kinds[name] for name in extra if name]
    results = [_value(name, dtype, ("B", 4, "Q", value_width)) for name in outputs[:1]]
    return _model([node], inputs, results)


def _scatter(
    cache: Shape = CACHE,
    outputs: Sequence[str] = ("present",),
    pasts: Sequence[str] = ("past",),
    inputs: Sequence[str] = ("past",),
    **attributes: Any,
) -> ir.Model:
    """A TensorScatter for each of `outputs`, from `pasts` in turn."""
    new = (*cache[:-2], 4, cache[-1]) if len(cache) > 3 else (2, 4, 8)
    nodes = [
        helper.make_node("TensorScatter", [past, "new", "start"], [out], out, **attributes)
        for past, out in zip(pasts, outputs, strict=True)
    ]
    given = [_value(name, HALF, cache) for name in inputs]
    given += [_value("new", HALF, new), _value("start", INT64, (2,))]
    return _model(nodes, given, [_value(name, HALF, cache) for name in outputs])


def test_a_good_attention_and_a_good_cache_have_no_findings() -> None:
    for model in (_attention(), _attention(dtype=TensorProto.BFLOAT16), _scatter()):
        assert _findings(model) == []
        assert takes(model) in (True, None)


def test_valid_lengths_are_dropped_silently() -> None:
    assert "nonpad_kv_seqlen" in _one(_attention(["mask", "", "", "lengths"]), is_taken=True)


def test_a_mask_does_not_go_with_is_causal() -> None:
    assert "a mask and is_causal" in _one(_attention(is_causal=1))
    assert _findings(_attention([], is_causal=1)) == []


def test_softcap_is_refused() -> None:
    assert "softcap 30" in _one(_attention(softcap=30.0))


def test_softmax_precision_is_refused() -> None:
    assert "softmax_precision" in _one(_attention(softmax_precision=FLOAT))


def test_a_cache_of_the_attention_itself_is_refused() -> None:
    model = _attention(["", "past_key", "past_value"])
    assert "past_key" in _one(model)


def test_attention_has_one_output() -> None:
    assert "has 2 outputs" in _one(_attention(outputs=["y", "present_key"]))


def test_values_are_as_wide_as_keys() -> None:
    assert "keys 8 wide and values 4 wide" in _one(_attention(value_width=4))


def test_the_width_of_a_cut_cache_is_seen() -> None:
    inputs = [_value("q", HALF, (2, 1, 4, 8)), _value("k", HALF, (2, 1, "t", 8))]
    inputs += [_value("v", HALF, (2, 1, 32, 4)), _value("length", INT64, (1,))]
    nodes = [
        helper.make_node("Slice", ["v", "zero", "length", "two"], ["cut"]),
        helper.make_node("Attention", ["q", "k", "cut"], ["y"], "attend", TRT_decomposable=1),
    ]
    constants = {"zero": np.array([0]), "two": np.array([2])}
    model = _model(nodes, inputs, [_value("y", HALF, (2, 1, 4, 4))], constants)
    assert "keys 8 wide and values 4 wide" in _one(model)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_attention_may_be_decomposed(dtype: int) -> None:
    found = _one(_attention(dtype=dtype, TRT_decomposable=0))
    assert "Give the node the attribute TRT_decomposable = 1" in found


@pytest.mark.parametrize(("width", "num_findings"), [(46, 1), (48, 0), (576, 0)])
def test_heads_of_halves_are_a_multiple_of_8_wide(width: int, num_findings: int) -> None:
    model = _attention(width=width)
    assert len(_findings(model)) == num_findings
    assert takes(model) in (num_findings == 0, None)
    assert _findings(_attention(width=width, dtype=FLOAT)) == []


def test_a_cache_is_linear() -> None:
    assert "has mode circular" in _one(_scatter(mode="circular"))


def test_a_cache_has_four_dimensions() -> None:
    assert "3 dimensions" in _one(_scatter(cache=(2, 32, 8), axis=1))


def test_a_cache_is_written_along_its_length() -> None:
    assert "along axis 1" in _one(_scatter(axis=1))


def test_a_cache_is_an_input_of_the_graph() -> None:
    nodes = [
        helper.make_node("Identity", ["past"], ["copy"]),
        helper.make_node("TensorScatter", ["copy", "new", "start"], ["present"], "write"),
    ]
    inputs = [_value("past", HALF, CACHE), _value("new", HALF, (2, 1, 4, 8))]
    inputs.append(_value("start", INT64, (2,)))
    found = _one(_model(nodes, inputs, [_value("present", HALF, CACHE)]))
    assert "'write' writes into 'copy', which is no input" in found


def test_a_cache_is_not_updated_twice_in_a_row() -> None:
    model = _scatter(outputs=["first", "second"], pasts=["past", "first"])
    assert "updates 'first', which was updated before" in _one(model)


def test_a_cache_has_one_update() -> None:
    model = _scatter(outputs=["first", "second"], pasts=["past", "past"])
    found = _findings(model)
    assert takes(model) in (False, None)
    assert len(found) == 2
    assert all("updates 'past' as others do" in text for text in found)


def test_an_updated_cache_is_an_output_of_the_graph() -> None:
    nodes = [
        helper.make_node("TensorScatter", ["past", "new", "start"], ["present"], "write"),
        helper.make_node("Identity", ["present"], ["y"]),
    ]
    inputs = [_value("past", HALF, CACHE), _value("new", HALF, (2, 1, 4, 8))]
    inputs.append(_value("start", INT64, (2,)))
    assert "no output of the graph" in _one(_model(nodes, inputs, [_value("y", HALF, CACHE)]))


def test_a_cache_has_a_fixed_length() -> None:
    assert "dynamic length S" in _one(_scatter(cache=(2, 1, "S", 8)))


@pytest.mark.parametrize(("k", "num_findings"), [(3840, 0), (3841, 1)])
def test_topk_is_bounded(k: int, num_findings: int) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["values", "ids"], "best")
    outputs = [_value("values", FLOAT, (2, k)), _value("ids", INT64, (2, k))]
    constants = {"k": np.array([k])}
    model = _model([node], [_value("x", FLOAT, (2, 9000))], outputs, constants)
    assert len(_findings(model)) == num_findings
    assert takes(model) in (num_findings == 0, None)


def test_operators_of_other_domains_are_refused() -> None:
    node = helper.make_node("Gelu", ["x"], ["y"], "act", domain="com.microsoft")
    model = _model([node], [_value("x", FLOAT, (2,))], [_value("y", FLOAT, (2,))])
    assert "Gelu 'act' is an operator of com.microsoft" in _one(model, is_taken=True)


def test_operators_that_tensorrt_lacks_are_refused_inside_branches_too() -> None:
    then = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["a"], "where")], "t", [], [_value("a", INT64, "ij")]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["ids"], ["b"])], "e", [], [_value("b", INT64, "ij")]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    inputs = [_value("c", TensorProto.BOOL, ()), _value("x", FLOAT, (2,))]
    inputs.append(_value("ids", INT64, "ij"))
    model = _model([node], inputs, [_value("y", INT64, "ij")])
    assert "NonZero 'where' is an operator that TensorRT lacks" in _one(model)


def test_uint4_is_refused() -> None:
    inputs = [_value("codes", TensorProto.UINT4, (4, 8)), _value("scale", FLOAT, ())]
    node = helper.make_node("DequantizeLinear", ["codes", "scale"], ["x"], "weights")
    assert "'codes', which is uint4" in _one(_model([node], inputs, [_value("x", FLOAT, (4, 8))]))


def test_integer_weights_are_read_by_dequantize_linear_alone() -> None:
    node = helper.make_node("Gather", ["codes", "ids"], ["rows"], "look_up")
    inputs, outputs = [_value("ids", INT64, (3,))], [_value("rows", TensorProto.INT8, (3, 8))]
    model = _model([node], inputs, outputs, {"codes": np.zeros((4, 8), np.int8)})
    assert "reads the integer weight 'codes' itself" in _one(model)


def test_a_graph_whose_types_contradict_each_other_is_found() -> None:
    nodes = [
        helper.make_node("Add", ["x", "ids"], ["sum"], "add"),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    inputs = [_value("x", FLOAT, (2,)), _value("ids", INT64, (2,))]
    found = _findings(_model(nodes, inputs, [_value("y", FLOAT, (2,))]))
    assert ["'sum', whose type cannot be inferred" in text for text in found] == [True]


def test_a_graph_of_specexport_lacks_only_what_the_pass_adds(tiny_bundle: Path) -> None:
    path = tiny_bundle / "target/model.onnx"
    remedies = {finding.remedy for finding in lint(path)}
    wanted = [r.remedy for r in RULES if r.problem.__name__ in ("_decomposable", "_cache_length")]
    assert remedies == set(wanted)
