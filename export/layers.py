"""The layer library: each function adds the nodes of one equation to a graph.

Everything is `ai.onnx` opset 24. Activations are fp32; weights are stored in the builder's weight
type and cast where they are used (engines fold the cast when they load the graph). What is stored
in another type, integers and fp8 above all, is changed afterwards (`export/quantize.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from specexport.export.blocks import BLOCK_SIZE
from specexport.export.manifest import FloatType, WeightType
from specexport.export.precision import has_codes

OPSET = 24
DATA_TYPES: dict[WeightType, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "fp8": ir.DataType.FLOAT8E4M3FN,
}


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows `start` to `stop` of each head's block of rows: [R, I] -> [heads, stop - start, I]."""

    num_heads: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Weight:
    """How an initializer is made: from which tensor, transposed or not, stored in which type."""

    source: str
    shape: tuple[int, ...]
    """In the checkpoint."""
    weight_type: WeightType
    transpose: bool = False
    """Exchange the last two axes."""
    head_rows: HeadRows | None = None
    is_exact: bool = False
    """Rounding would harm it: never stored in another type."""


class GraphBuilder:
    """A tape of nodes plus the recipe of every weight that they use."""

    def __init__(self, weight_type: FloatType, lender: "GraphBuilder | None" = None) -> None:
        """Large weights will be stored as `weight_type`, vectors as fp32.

        `lender` is the builder of a graph in the same folder whose weights `shared` reads.
        """
        self.weight_type = weight_type
        self.weights: dict[str, Weight] = {}
        self.tables: dict[str, np.ndarray[Any, Any]] = {}
        self.borrowed: dict[str, ir.Value] = {}
        """By name: the lender's initializers that this graph reads where they lie."""
        self._lender = lender
        self._tape = Tape()
        self._initializers: dict[str, ir.Value] = {}

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:  # noqa: ANN401
        """Add a node with one output."""
        return self._tape.op(op_type, list(inputs), attributes=attributes)

    def ops(
        self,
        op_type: str,
        num_outputs: int,
        *inputs: ir.Value | None,
        **attributes: Any,  # noqa: ANN401
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        return self._tape.op_multi_out(
            op_type, list(inputs), num_outputs=num_outputs, attributes=attributes
        )

    def ints(self, *values: int) -> ir.Value:
        """A constant int64 vector."""
        name = "const_" + "_".join(str(value) for value in values)
        if name not in self._initializers:
            tensor = ir.tensor(np.array(values, dtype=np.int64), name=name)
            self._initializers[name] = self._tape.initializer(tensor)
        return self._initializers[name]

    def scalar(self, value: float) -> ir.Value:
        """A constant without axes: int64 for an `int`, fp32 for a `float`."""
        name = f"const_scalar_{value!r}"
        if name not in self._initializers:
            dtype = np.int64 if isinstance(value, int) else np.float32
            tensor = ir.tensor(np.array(value, dtype=dtype), name=name)
            self._initializers[name] = self._tape.initializer(tensor)
        return self._initializers[name]

    def matrix(self, source: str, *shape: int, transpose: bool = False) -> ir.Value:
        """A two-dimensional weight as stored, in the builder's weight type."""
        weight = Weight(source, shape, self.weight_type, transpose)
        return self._add(source, weight, shape[::-1] if transpose else shape)

    def head_matrices(
        self, name: str, source: str, shape: tuple[int, int], rows: HeadRows, *, transpose: bool
    ) -> ir.Value:
        """A matrix a head, [heads, r, I] (or [heads, I, r]), cut from one of `shape` [R, I]."""
        weight = Weight(source, shape, self.weight_type, transpose, rows)
        num_rows, size_in = rows.stop - rows.start, shape[1]
        sizes = (size_in, num_rows) if transpose else (num_rows, size_in)
        return self._add(name, weight, (rows.num_heads, *sizes))

    def vector(self, source: str, size: int) -> ir.Value:
        """A one-dimensional weight, always fp32."""
        return self.exact(source, size)

    def exact(self, source: str, *shape: int, transpose: bool = False) -> ir.Value:
        """A small weight that rounding would harm, fp32 whatever the weight type."""
        weight = Weight(source, shape, "fp32", transpose, is_exact=True)
        return self._add(source, weight, shape[::-1] if transpose else shape)

    def table(self, name: str, values: np.ndarray[Any, Any]) -> ir.Value:
        """A computed fp32 table, stored with the weights."""
        self.tables[name] = values
        self._initializers[name] = _initializer(name, values.shape, ir.DataType.FLOAT)
        return self._initializers[name]

    def shared(self, name: str) -> ir.Value:
        """The lender's weight of this name, stored once for both graphs."""
        assert self._lender is not None
        if name not in self._initializers:
            lent = self._lender._initializers[name]
            assert lent.shape is not None
            assert lent.dtype is not None
            self.borrowed[name] = lent
            self._initializers[name] = ir.Value(
                name=name, shape=lent.shape.copy(), type=ir.TensorType(lent.dtype)
            )
        return self._initializers[name]

    def to_fp32(self, value: ir.Value) -> ir.Value:
        """Cast, unless the weight is fp32 already."""
        if value.dtype == ir.DataType.FLOAT:
            return value
        return self.op("Cast", value, to=ir.DataType.FLOAT)

    def graph(self, inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Graph:
        """Close the graph."""
        return ir.Graph(
            inputs,
            outputs,
            nodes=self._tape.nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET},
            name="decoder",
        )

    def _add(self, name: str, weight: Weight, shape: tuple[int, ...]) -> ir.Value:
        if name not in self._initializers:
            self.weights[name] = weight
            self._initializers[name] = _initializer(name, shape, DATA_TYPES[weight.weight_type])
        return self._initializers[name]


def initializer_names(name: str, weight: Weight) -> list[str]:
    """Names of the one value, or of codes and scales."""
    return [name, f"{name}.scales"] if has_codes(weight.weight_type) else [name]


def initializers(name: str, weight: Weight) -> list[ir.Value]:
    """What a whole matrix is stored as: one value, or codes and scales."""
    *rows, size_in = weight.shape
    shapes = [weight.shape, (*rows, size_in // BLOCK_SIZE)]
    dtypes = [DATA_TYPES[weight.weight_type], ir.DataType.FLOAT]
    return [
        _initializer(each, shape[::-1] if weight.transpose else shape, dtype)
        for each, shape, dtype in zip(initializer_names(name, weight), shapes, dtypes, strict=False)
    ]


def _initializer(name: str, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def linear(  # [..., I] -> [..., O]
    g: GraphBuilder, x: ir.Value, name: str, sizes: tuple[int, int], *, bias: bool
) -> ir.Value:
    """`x W^T + b`, with W stored transposed as [I, O]; `sizes` is (I, O)."""
    size_in, size_out = sizes
    weight = g.matrix(f"{name}.weight", size_out, size_in, transpose=True)
    y = g.op("MatMul", x, g.to_fp32(weight))
    return g.op("Add", y, g.vector(f"{name}.bias", size_out)) if bias else y


def rms_norm(g: GraphBuilder, x: ir.Value, name: str, size: int, eps: float) -> ir.Value:
    """`x / sqrt(mean(x^2) + eps) * w` over the last axis."""
    return g.op("RMSNormalization", x, g.vector(f"{name}.weight", size), axis=-1, epsilon=eps)


def embedding(g: GraphBuilder, input_ids: ir.Value, table: ir.Value) -> ir.Value:
    """Rows of the [V, H] table: [B, Q] -> [B, Q, H]."""
    return g.to_fp32(g.op("Gather", table, input_ids, axis=0))


def wanted_rows(g: GraphBuilder, hidden: ir.Value, size: int, indices: ir.Value) -> ir.Value:
    """Rows of the flattened [B * Q, H] that are asked for: [B, Q, H], [N] -> [N, H]."""
    return g.op("Gather", g.op("Reshape", hidden, g.ints(-1, size)), indices, axis=0)


def lm_head(
    g: GraphBuilder, hidden: ir.Value, weight: ir.Value, bias: ir.Value | None = None
) -> ir.Value:
    """Logits `x W^T + b` with W as stored, [V, H]: [N, H] -> [N, V]."""
    biases = [] if bias is None else [bias]
    return g.op("Gemm", hidden, g.to_fp32(weight), *biases, transB=1)


def gated_mlp(
    g: GraphBuilder, x: ir.Value, name: str, sizes: tuple[int, int], *, bias: bool
) -> ir.Value:
    """`down(silu(gate(x)) * up(x))`; `sizes` is (H, intermediate)."""
    hidden, intermediate = sizes
    gate = linear(g, x, f"{name}.gate_proj", (hidden, intermediate), bias=bias)
    up = linear(g, x, f"{name}.up_proj", (hidden, intermediate), bias=bias)
    inner = gated(g, gate, up)
    return linear(g, inner, f"{name}.down_proj", (intermediate, hidden), bias=bias)


def gated(g: GraphBuilder, gate: ir.Value, up: ir.Value) -> ir.Value:
    """`silu(gate) * up`."""
    return g.op("Mul", silu(g, gate), up)


def silu(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """`x * sigmoid(x)`."""
    return g.op("Mul", x, g.op("Sigmoid", x))


@dataclass(frozen=True, slots=True)
class StepValues:
    """The graph inputs that every attention layer reads, and the rotary tables (R rotated)."""

    position_ids: ir.Value  # [B, Q]
    write_indices: ir.Value  # [B]
    attention_mask: ir.Value  # [B, 1, Q, T]
    valid_length: ir.Value  # [1] = T
    cos: ir.Value  # [max_length, R/2]
    sin: ir.Value


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and options of one attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    rotary_dim: int
    rope_interleaved: bool
    input_size: int
    """Width of what is read; hidden_size is that of what is given."""


def attention(
    g: GraphBuilder,
    x: ir.Value,  # [B, Q, input_size]
    name: str,
    shape: AttentionShape,
    step: StepValues,
    past: tuple[ir.Value, ...],  # key, value: [B, Hkv, S, D]
) -> tuple[ir.Value, tuple[ir.Value, ...]]:
    """Grouped-query attention over the cache after writing this step's keys and values into it."""
    query = _heads(g, x, f"{name}.q_proj", shape, shape.num_heads)
    key = _heads(g, x, f"{name}.k_proj", shape, shape.num_kv_heads)
    value = _heads(g, x, f"{name}.v_proj", shape, shape.num_kv_heads)
    if shape.qk_norm:
        query = rms_norm(g, query, f"{name}.q_norm", shape.head_dim, shape.norm_eps)
        key = rms_norm(g, key, f"{name}.k_norm", shape.head_dim, shape.norm_eps)
    query, key = _rotate_head(g, query, shape, step), _rotate_head(g, key, shape, step)
    past_key, past_value = past
    present_key = write_cache(g, past_key, key, step)
    present_value = write_cache(g, past_value, value, step)
    context = g.op(  # [B, Hq, Q, D]
        "Attention",
        query,
        valid_entries(g, present_key, step),
        valid_entries(g, present_value, step),
        step.attention_mask,
    )
    width = shape.num_heads * shape.head_dim
    context = join_heads(g, context, width)
    sizes = (width, shape.hidden_size)
    output = linear(g, context, f"{name}.o_proj", sizes, bias=shape.output_bias)
    return output, (present_key, present_value)


def _heads(
    g: GraphBuilder, x: ir.Value, name: str, shape: AttentionShape, num_heads: int
) -> ir.Value:
    """Project and split: [B, Q, input_size] -> [B, heads, Q, D]."""
    sizes = (shape.input_size, num_heads * shape.head_dim)
    return split_heads(g, linear(g, x, name, sizes, bias=shape.qkv_bias), num_heads, shape.head_dim)


def _rotate_head(g: GraphBuilder, x: ir.Value, shape: AttentionShape, step: StepValues) -> ir.Value:
    partial_dim = shape.rotary_dim if shape.rotary_dim != shape.head_dim else None
    return rotate(g, x, step, interleaved=shape.rope_interleaved, partial_dim=partial_dim)


def split_heads(g: GraphBuilder, x: ir.Value, num_heads: int, head_dim: int) -> ir.Value:
    """[B, Q, heads * D] -> [B, heads, Q, D]."""
    y = g.op("Reshape", x, g.ints(0, 0, num_heads, head_dim))
    return g.op("Transpose", y, perm=[0, 2, 1, 3])


def join_heads(g: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
    """[B, heads, Q, D] -> [B, Q, heads * D], the `width`."""
    return g.op("Reshape", g.op("Transpose", x, perm=[0, 2, 1, 3]), g.ints(0, 0, width))


def rotate(
    g: GraphBuilder,
    x: ir.Value,  # [B, heads, Q, D]
    step: StepValues,
    *,
    interleaved: bool,
    partial_dim: int | None = None,
) -> ir.Value:
    """Rotary embedding at the step's positions, of the first `partial_dim` dimensions or of all."""
    attributes = {"interleaved": 1} if interleaved else {}
    if partial_dim is not None:
        attributes["rotary_embedding_dim"] = partial_dim
    return g.op("RotaryEmbedding", x, step.cos, step.sin, step.position_ids, **attributes)


def write_cache(g: GraphBuilder, past: ir.Value, new: ir.Value, step: StepValues) -> ir.Value:
    """The cache with this step's entries at each row's write index."""
    return g.op("TensorScatter", past, new, step.write_indices, axis=-2)


def valid_entries(g: GraphBuilder, present: ir.Value, step: StepValues) -> ir.Value:
    """The first T entries: attention must not read the whole buffer."""
    return g.op("Slice", present, g.ints(0), step.valid_length, g.ints(2))
