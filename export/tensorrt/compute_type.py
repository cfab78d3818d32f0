"""Products and attention in fp16 or bf16: a pass over a graph whose activations are fp32.

TensorRT takes its precision from the graph's types. With T the type that is asked for:

1. `MatMul`, `Gemm`, `Attention` and `TensorScatter` read and give T, so the caches are T too;
2. what only moves numbers (`Reshape`, `Slice`, `Concat`, …) has the type of what it is given;
3. weights are cast from the type in which they are stored, once; integers are multiplied out to T;
4. all else stays fp32: the residual stream, norms, rotations, activation functions, routers, and
   inputs and outputs other than caches. fp16 ends at 65504, which residual streams do exceed.
"""

from collections.abc import Iterable
from typing import Literal

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from specexport.export.layers import DATA_TYPES
from specexport.export.moe import is_router

_PRODUCTS = frozenset({"MatMul", "Gemm", "Attention", "TensorScatter"})
_MOVES = frozenset(
    {"Concat", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class ComputeType(ir.passes.InPlacePass):
    """Compute products and attention as fp16 or bf16."""

    def __init__(self, compute_type: Literal["fp16", "bf16"]) -> None:
        """`compute_type` is T."""
        super().__init__()
        self._type = DATA_TYPES[compute_type]

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change the model in place."""
        ShapeInferencePass()(model)
        graph = model.graph
        casts = _Casts(graph)
        self._retype_caches(graph)
        for node in list(graph):
            wanted = self._wanted(node)
            if wanted is not None:
                casts.read_as(node, wanted)
        casts.give_outputs(ir.DataType.FLOAT, except_for=_written_caches(graph))
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def _retype_caches(self, graph: ir.Graph) -> None:
        for node in graph:
            if node.op_type == "TensorScatter" and node.inputs[0] is not None:
                node.inputs[0].dtype = self._type

    def _wanted(self, node: ir.Node) -> ir.DataType | None:
        """The type that the node computes in; None leaves it alone."""
        if node.op_type == "Cast":
            return None
        if node.op_type == "DequantizeLinear":
            return self._type if _is_weight(node.inputs[0]) else None
        if node.op_type in _PRODUCTS and not any(map(_is_of_router, node.inputs)):
            return self._type
        if node.op_type in _MOVES and node.inputs[0] is not None:
            return node.inputs[0].dtype if node.inputs[0].dtype in _FLOATS else None
        return ir.DataType.FLOAT


class _Casts:
    """Casts of one graph, each value once for each type."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def read_as(self, node: ir.Node, dtype: ir.DataType) -> None:
        """Let the node read its floats as `dtype`, and give them so."""
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype in _FLOATS and value.dtype != dtype:
                node.replace_input_with(index, self._cast(value, dtype, node))
        for value in node.outputs:
            if value.dtype in _FLOATS:
                value.dtype = dtype

    def give_outputs(self, dtype: ir.DataType, *, except_for: Iterable[ir.Value]) -> None:
        """Let the graph's outputs have `dtype` under their own names."""
        kept = set(except_for)
        for index, value in enumerate(self._graph.outputs):
            if value not in kept and value.dtype in _FLOATS and value.dtype != dtype:
                name, value.name = value.name, f"{value.name}.computed"
                cast = self._node(value, dtype, name)
                cast.outputs[0].shape = value.shape
                self._graph.append(cast)
                self._graph.outputs[index] = cast.outputs[0]

    def _cast(self, value: ir.Value, dtype: ir.DataType, reader: ir.Node) -> ir.Value:
        """What was cast before is cast from where it came from."""
        producer = value.producer()
        if producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
            source = producer.inputs[0]
            value = source if _is_weight(source) else value
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self._made:
            node = self._node(value, dtype, f"{value.name}.{dtype.name.lower()}")
            self._graph.insert_before(reader, node)
            self._made[value, dtype] = node.outputs[0]
        return self._made[value, dtype]

    @staticmethod
    def _node(value: ir.Value, dtype: ir.DataType, name: str | None) -> ir.Node:
        node = ir.node("Cast", [value], attributes={"to": dtype})
        node.outputs[0].name, node.outputs[0].dtype = name, dtype
        return node


def _written_caches(graph: ir.Graph) -> list[ir.Value]:
    scatters = (node for node in graph if node.op_type == "TensorScatter")
    return [node.outputs[0] for node in scatters]


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer()


def _is_of_router(value: ir.Value | None) -> bool:
    return value is not None and is_router(value.name or "")
