"""A pass over a built graph: matrices in other types than the builder's, codes above all.

Codes and scales are made when the weights are written (`export/blocks.py`); here only nodes and
recipes change. C are codes, S scales, one for each block of 32 inputs:

1. `MatMul(x, W)` → `MatMul(x, DequantizeLinear(C [I, O], S [I/32, O], axis=0))`, standard ONNX that
   ONNX Runtime turns into one product with integer weights when it loads the graph;
2. `Gemm(x, W^T) + b`, the output matrix → the same, and `Add`; as floats → `Gemm` with a `Cast`;
3. `Gather(W, ids)`, the embedding → `DequantizeLinear(Gather(C [V, H]), Gather(S [V, H/32]))`; as
   floats → `Gather` and `Cast`; as fp8 → `Gather(DequantizeLinear(C, S), ids)`, since ONNX looks up
   no rows of fp8.

What is left as the builder made it: weights marked exact (norms, biases, routers), the matrices a
head that latent attention cuts from one, and any whose input size is no multiple of 32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.tape import Tape

from specexport.export.blocks import BLOCK_SIZE
from specexport.export.graph_io import DecoderGraph
from specexport.export.layers import DATA_TYPES, Weight, initializers
from specexport.export.manifest import WeightType
from specexport.export.precision import Precision, has_codes

Role = Literal["body", "lm_head", "embedding"]
_ROLES: dict[str, Role] = {"MatMul": "body", "Gemm": "lm_head", "Gather": "embedding"}


@dataclass(frozen=True, slots=True)
class Stored:
    """What the pass made of a graph."""

    precision: Precision
    """As it is: with the lender's types where a matrix is the lender's."""
    roles: frozenset[Role]
    """Those that there are in the graph."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Use:
    """One product with a matrix, or a look-up in it."""

    role: Role
    node: ir.Node
    cast: ir.Node | None
    """To fp32: of the matrix before a product, of the rows after a look-up."""
    name: str
    weight: Weight

    @property
    def result(self) -> ir.Value:
        """What the rest of the graph reads."""
        is_last = self.role == "embedding" and self.cast is not None
        return (self.cast if is_last and self.cast else self.node).outputs[0]


def quantize(
    graph: DecoderGraph, wanted: Precision, lender: tuple[DecoderGraph, Stored] | None = None
) -> Stored:
    """Store the matrices of `graph` as `wanted`, in place.

    Those borrowed from `lender`, which has been through the pass, are read as they are there.
    """
    found, ragged, uses = wanted, [], list(_uses(graph))
    for use in uses:
        lent_by = lender if use.name in graph.builder.borrowed else None
        if lent_by is not None:
            found = _with(found, use, getattr(lent_by[1].precision, use.role))
        weight_type: WeightType = getattr(found, use.role)
        if has_codes(weight_type) and use.weight.shape[-1] % BLOCK_SIZE:
            ragged.append(use)
            if use.role != "body":
                found = _with(found, use, use.weight.weight_type)
        elif weight_type != use.weight.weight_type:
            _replace(graph, use, weight_type, lent_by[0] if lent_by else None)
    _drop_unused(graph)
    return Stored(found, frozenset(use.role for use in uses), _notes(ragged))


def _with(precision: Precision, use: _Use, weight_type: WeightType) -> Precision:
    types: dict[str, Any] = {use.role: weight_type}
    return replace(precision, **types)


def _uses(graph: DecoderGraph) -> Iterator[_Use]:
    """All products with matrices of the graph, and look-ups in them."""
    for node in graph.model.graph:
        role = _ROLES.get(node.op_type)
        if role is None:
            continue
        value, cast = node.inputs[0 if role == "embedding" else 1], None
        if role == "embedding":
            readers = [use.node for use in node.outputs[0].uses()]
            cast = next((reader for reader in readers if reader.op_type == "Cast"), None)
        elif value is not None and (cast := _cast_of(value)) is not None:
            value = cast.inputs[0]
        if value is not None and (weight := _recipe(graph, value)) is not None:
            yield _Use(role, node, cast, value.name or "", weight)


def _cast_of(value: ir.Value) -> ir.Node | None:
    producer = value.producer()
    return producer if producer is not None and producer.op_type == "Cast" else None


def _recipe(graph: DecoderGraph, value: ir.Value) -> Weight | None:
    """How the matrix `value` is made; None where it is none, or must stay as it is."""
    name, builder = value.name or "", graph.builder
    if name in builder.borrowed:
        assert value.shape is not None
        weight_type = next(word for word, dtype in DATA_TYPES.items() if dtype == value.dtype)
        return Weight(name, tuple(value.shape.numpy()), weight_type)
    weight = builder.weights.get(name)
    if weight is None or weight.is_exact or weight.head_rows is not None:
        return None
    return weight


def _replace(
    graph: DecoderGraph, use: _Use, weight_type: WeightType, lender: DecoderGraph | None
) -> None:
    """Write the nodes of one use again, with the matrix as `weight_type`."""
    tape = Tape()
    values = _initializers(graph, use, weight_type, lender)
    make = _look_up if use.role == "embedding" else _product
    result = make(tape, use, values)
    old = [node for node in (use.cast, use.node) if node is not None]
    convenience.replace_nodes_and_values(
        graph.model.graph, use.node, old, tape.nodes, [use.result], [result]
    )


def _look_up(tape: Tape, use: _Use, values: list[ir.Value]) -> ir.Value:
    """Rows of the embedding as fp32."""
    ids, blocks = use.node.inputs[1], {"axis": -1, "block_size": BLOCK_SIZE}
    if values[0].dtype == DATA_TYPES["fp8"]:
        table = tape.op("DequantizeLinear", values, attributes=blocks)
        return tape.op("Gather", [table, ids], attributes={"axis": 0})
    rows = [tape.op("Gather", [value, ids], attributes={"axis": 0}) for value in values]
    if len(rows) == 1:
        return _to_fp32(tape, rows[0], values[0])
    return tape.op("DequantizeLinear", rows, attributes=blocks)


def _product(tape: Tape, use: _Use, values: list[ir.Value]) -> ir.Value:
    """`x W^T`, plus what the node adds."""
    x, _, *biases = use.node.inputs
    if len(values) == 1:
        matrix = _to_fp32(tape, values[0], values[0])
        return tape.op("Gemm", [x, matrix, *biases], attributes={"transB": 1})
    # One DequantizeLinear for each product: shared, it would not be fused with any.
    attributes = {"axis": 0, "block_size": BLOCK_SIZE}
    matrix = tape.op("DequantizeLinear", values, attributes=attributes)
    y = tape.op("MatMul", [x, matrix])
    return tape.op("Add", [y, *biases]) if biases else y


def _to_fp32(tape: Tape, value: ir.Value, weight: ir.Value) -> ir.Value:
    if weight.dtype == ir.DataType.FLOAT:
        return value
    return tape.op("Cast", [value], attributes={"to": ir.DataType.FLOAT})


def _initializers(
    graph: DecoderGraph, use: _Use, weight_type: WeightType, lender: DecoderGraph | None
) -> list[ir.Value]:
    """The matrix as `weight_type`: one value, or codes and scales, made only once."""
    by_rows = has_codes(weight_type) and use.role == "embedding"
    name = f"{use.name}.{'rows_' if by_rows else ''}{weight_type}"
    transpose = has_codes(weight_type) and not by_rows
    weight = replace(use.weight, weight_type=weight_type, transpose=transpose)
    values, known = initializers(name, weight), graph.model.graph.initializers
    for value in values:
        assert value.name is not None
        if value.name not in known:
            known.add(value)
            if lender is not None:
                graph.builder.borrowed[value.name] = lender.model.graph.initializers[value.name]
            else:
                graph.builder.weights[name] = weight
    return [known[value.name or ""] for value in values]


def _drop_unused(graph: DecoderGraph) -> None:
    """Forget matrices that nothing reads any more."""
    known = graph.model.graph.initializers
    for recipes in (graph.builder.weights, graph.builder.borrowed):
        for name in [name for name in recipes if not known[name].uses()]:
            del recipes[name]
            del known[name]


def _notes(ragged: list[_Use]) -> tuple[str, ...]:
    if not ragged:
        return ()
    weight = ragged[0].weight
    return (
        f"{len(ragged)} matrices stay {weight.weight_type}, because their input size is no "
        f"multiple of {BLOCK_SIZE} (first {weight.source} {list(weight.shape)}).",
    )
