"""The form of a graph that TensorRT takes: a pass over a loaded graph; the file stays as it is.

1. Every `Attention` gets `TRT_decomposable`: where no fused kernel fits (fp32, and head sizes such
   as those of latent attention), it is computed as products and a softmax instead of being refused.
   The attribute is not part of ONNX, so it is never saved.
2. The caches get a fixed length S, which TensorRT's in-place update wants.
3. `DequantizeLinear(Gather(C, ids), Gather(S, ids))`, rows of an embedding of integers →
   `Gather(DequantizeLinear(C, S), ids)`: integer weights may be read by `DequantizeLinear` alone.
"""

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

CACHE_LENGTH = "cache_length"
"""The name of the dimension S in the graphs that `build` writes."""


class TensorRTForm(ir.passes.InPlacePass):
    """Make the form of a graph whose caches hold `cache_length` entries a slot."""

    def __init__(self, cache_length: int) -> None:
        """`cache_length` is S: the text, the drafted tokens past it, and padding."""
        super().__init__()
        self._cache_length = cache_length

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change the model in place."""
        graph = model.graph
        for value in (*graph.inputs, *graph.outputs):
            value.shape = self._fixed(value.shape)
        for node in list(graph):
            if node.op_type == "Attention":
                node.attributes.add(ir.AttrInt64("TRT_decomposable", 1))
            elif node.op_type == "DequantizeLinear" and _is_gather(node.inputs[0]):
                _dequantize_first(graph, node)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def _fixed(self, shape: ir.Shape | None) -> ir.Shape | None:
        """The shape with S in place of its name."""
        if shape is None:
            return None
        return ir.Shape([self._cache_length if _is_length(dim) else dim for dim in shape])


def _is_length(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value == CACHE_LENGTH


def _is_gather(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "Gather"


def _dequantize_first(graph: ir.Graph, node: ir.Node) -> None:
    """Rule 3 for one look-up."""
    codes, scales = (value.producer() for value in node.inputs if value is not None)
    assert codes is not None
    assert scales is not None
    tape = Tape()
    both = [codes.inputs[0], scales.inputs[0]]
    table = tape.op("DequantizeLinear", both, attributes=node.attributes)
    rows = tape.op("Gather", [table, codes.inputs[1]], attributes={"axis": 0})
    convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, [node.outputs[0]], [rows])
