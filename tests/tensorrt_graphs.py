"""Runs graphs of any types on ONNX Runtime, and asks TensorRT-RTX whether it would."""

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - onnx_ir names its types
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from specexport.errors import ConfigError, EngineError
from specexport.export.engine_spec import ShapeProfile, SizeRange
from specexport.export.tensorrt.library import find_library
from specexport.export.tensorrt.plan import PlanOptions, build_plan

CACHE_LENGTH = 64
BATCH, QUERY = 2, 5
Outputs = dict[str, NDArray[Any]]


def run(model: ir.Model, folder: str, seed: int = 0) -> Outputs:
    """One prefill step of random tokens on ONNX Runtime; `folder` holds the external weights."""
    for node in model.graph:
        node.attributes.pop("TRT_decomposable", None)  # ONNX Runtime does not know it
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    # Integer weights are multiplied out, as TensorRT reads them.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    outputs = [value.name or "" for value in model.graph.outputs]
    found = session.run(outputs, {v.name: _feed(v, seed) for v in model.graph.inputs})
    return dict(zip(outputs, found, strict=True))


def takes(model: ir.Model) -> bool | None:
    """Whether TensorRT-RTX builds a graph for SM89; None where it is not installed."""
    try:
        library = find_library("tensorrt-rtx")
    except ConfigError:
        return None
    dims = {
        dim.value
        for v in model.graph.inputs
        for dim in v.shape or ()
        if isinstance(dim, ir.SymbolicDim)
    }
    sizes = {str(dim): SizeRange(min=1, opt=CACHE_LENGTH, max=CACHE_LENGTH) for dim in dims}
    profiles = (ShapeProfile(name="any", sizes=sizes),) if sizes else ()
    try:
        build_plan(library, model, Path("model.onnx"), PlanOptions(("sm89",), profiles))
    except EngineError:
        return False
    return True


def cache_values(model: ir.Model) -> list[ir.Value]:
    """Caches among the inputs and outputs."""
    values = (*model.graph.inputs, *model.graph.outputs)
    return [v for v in values if (v.name or "").startswith(("past_key_values.", "present."))]


def _feed(value: ir.Value, seed: int) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": rng.integers(0, 256, (BATCH, QUERY)),
        "position_ids": np.tile(np.arange(QUERY), (BATCH, 1)),
        "write_indices": np.zeros(BATCH, np.int64),
        "attention_mask": np.tile(np.tri(QUERY, dtype=np.bool_), (BATCH, 1, 1, 1)),
        "logits_indices": np.arange(BATCH * QUERY),
    }
    if value.name in feeds:
        return feeds[value.name]
    assert value.shape is not None
    assert value.dtype is not None
    sizes = {"batch": BATCH, "query": QUERY, "cache_length": CACHE_LENGTH, "rows": BATCH}
    shape = [dim if isinstance(dim, int) else sizes[str(dim.value)] for dim in value.shape]
    is_cache = (value.name or "").startswith("past_key_values")
    numbers = np.zeros(shape) if is_cache else rng.normal(size=shape)
    return numbers.astype(value.dtype.numpy())
