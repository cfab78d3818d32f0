"""What TensorRT refuses in a graph, or drops without a word: found before anything is built.

A rule is a function from a node to the problem that it has, and what to do about it. Each has a
test with a graph that TensorRT-RTX 1.7 refuses, but for two: it drops `nonpad_kv_seqlen`, and it
takes some operators of other domains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes.common import ShapeInferencePass
from onnx_ir.traversal import RecursiveGraphIterator

LARGEST_TOP_K = 3840
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_CODES = (ir.DataType.INT8, ir.DataType.INT4)
_REFUSED_OPS = frozenset(
    {
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Compress",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "Multinomial",
        "NonZero",
        "Unique",
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that TensorRT would refuse or drop."""

    node: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.node} {self.problem}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class Rule:
    """What is wrong with nodes of one operator, or of any."""

    op_type: str | None
    problem: Callable[[ir.Node], str | None]
    """None where there is none; else it follows the node's name in a sentence."""
    remedy: str


def lint(model: ir.Model | Path) -> list[Finding]:
    """All findings in a graph, in the order of its nodes; types and shapes are inferred first."""
    model = ir.load(model) if isinstance(model, Path) else model
    ShapeInferencePass()(model)
    return [
        Finding(_name(node), problem, rule.remedy)
        for node in RecursiveGraphIterator(model.graph)
        for rule in RULES
        if rule.op_type in (None, node.op_type)
        if (problem := rule.problem(node)) is not None
    ]


def _name(node: ir.Node) -> str:
    outputs = ", ".join(value.name or "?" for value in node.outputs)
    return f"{node.op_type} {node.name or outputs!r}"


# Any node.


def _domain(node: ir.Node) -> str | None:
    return f"is an operator of {node.domain}" if node.domain not in ("", "ai.onnx") else None


def _operator(node: ir.Node) -> str | None:
    return "is an operator that TensorRT lacks" if node.op_type in _REFUSED_OPS else None


def _uint4(node: ir.Node) -> str | None:
    values = [value for value in node.inputs if value is not None]
    found = next((value for value in values if value.dtype == ir.DataType.UINT4), None)
    return f"reads {found.name!r}, which is uint4" if found is not None else None


def _integer_weight(node: ir.Node) -> str | None:
    if node.op_type == "DequantizeLinear":
        return None
    weights = [value for value in node.inputs if value is not None and value.is_initializer()]
    found = next((value for value in weights if value.dtype in _CODES), None)
    return f"reads the integer weight {found.name!r} itself" if found is not None else None


def _type(node: ir.Node) -> str | None:
    is_known = all(value is None or value.dtype is not None for value in node.inputs)
    unknown = [value for value in node.outputs if value.name and value.dtype is None]
    if node.domain or not is_known or not unknown:
        return None
    return f"gives {unknown[0].name!r}, whose type cannot be inferred"


# Attention.


def _valid_lengths(node: ir.Node) -> str | None:
    return "has the input nonpad_kv_seqlen, which is dropped silently" if _input(node, 6) else None


def _mask_and_causal(node: ir.Node) -> str | None:
    both = _input(node, 3) and _int(node, "is_causal", 0)
    return "has a mask and is_causal" if both else None


def _softcap(node: ir.Node) -> str | None:
    value = node.attributes.get_float("softcap", 0.0)
    return f"has softcap {value:g}" if value else None


def _softmax_precision(node: ir.Node) -> str | None:
    return "has softmax_precision" if "softmax_precision" in node.attributes else None


def _own_cache(node: ir.Node) -> str | None:
    past = _input(node, 4) or _input(node, 5)
    return "has past_key or past_value" if past else None


def _more_outputs(node: ir.Node) -> str | None:
    used = sum(1 for value in node.outputs if value.name)
    return f"has {used} outputs" if used > 1 else None


def _value_width(node: ir.Node) -> str | None:
    widths = [_width(value) for value in node.inputs[1:3]]
    if None in widths or widths[0] == widths[1]:
        return None
    return f"has keys {widths[0]} wide and values {widths[1]} wide"


def _decomposable(node: ir.Node) -> str | None:
    if _int(node, "TRT_decomposable", 0):
        return None
    return "lacks TRT_decomposable, and there is no kernel for fp32 and many a shape"


def _half_width(node: ir.Node) -> str | None:
    query = _input(node, 0)
    width = _width(query)
    if query is None or query.dtype not in _HALVES or width is None or width % 8 == 0:
        return None
    return f"has heads {width} wide, and fp16 and bf16 want multiples of 8"


# TensorScatter: the cache.


def _mode(node: ir.Node) -> str | None:
    mode = node.attributes.get_string("mode", "linear")
    return f"has mode {mode}" if mode != "linear" else None


def _axis(node: ir.Node) -> str | None:
    axis, rank = _int(node, "axis", -2), _rank(node)
    if rank not in (None, 4):
        return f"writes into a cache of {rank} dimensions"
    return f"writes along axis {axis}" if axis not in (-2, 2) else None


def _cache_input(node: ir.Node) -> str | None:
    cache = _input(node, 0)
    if cache is None or cache.is_graph_input():
        return None
    producer = cache.producer()
    if producer is not None and producer.op_type == "TensorScatter":
        return f"updates {cache.name!r}, which was updated before"
    return f"writes into {cache.name!r}, which is no input of the graph"


def _one_update(node: ir.Node) -> str | None:
    cache = _input(node, 0)
    writers = [use.node for use in cache.uses() if use.idx == 0] if cache is not None else []
    updates = [writer for writer in writers if writer.op_type == "TensorScatter"]
    return f"updates {cache.name!r} as others do" if cache and len(updates) > 1 else None


def _cache_output(node: ir.Node) -> str | None:
    updated = node.outputs[0]
    return None if updated.is_graph_output() else f"gives {updated.name!r}, no output of the graph"


def _cache_length(node: ir.Node) -> str | None:
    cache = _input(node, 0)
    if cache is None or not cache.is_graph_input() or cache.shape is None or len(cache.shape) != 4:
        return None
    length = cache.shape[-2]
    return None if isinstance(length, int) else f"writes into a cache of dynamic length {length}"


# TopK.


def _top_k(node: ir.Node) -> str | None:
    k = _input(node, 1)
    tensor = convenience.get_const_tensor(k) if k is not None else None
    largest = int(tensor.numpy().max()) if tensor is not None else 0
    return f"takes the {largest} largest" if largest > LARGEST_TOP_K else None


RULES = (
    Rule(None, _domain, "Write it with operators of ai.onnx."),
    Rule(None, _operator, "Write it with other operators."),
    Rule(None, _uint4, "Store it as int4."),
    Rule(None, _integer_weight, "Read it with DequantizeLinear."),
    Rule(None, _type, "Check the graph with onnx.checker."),
    Rule("Attention", _valid_lengths, "Put the valid lengths into the mask."),
    Rule("Attention", _mask_and_causal, "Put causality into the mask."),
    Rule("Attention", _softcap, "Write the attention with MatMul, Tanh and Softmax."),
    Rule("Attention", _softmax_precision, "Leave it out: the accumulator is fp32 in any case."),
    Rule("Attention", _own_cache, "Keep the cache with TensorScatter."),
    Rule("Attention", _more_outputs, "Use the first alone."),
    Rule("Attention", _value_width, "Pad the values with zeros to the width of the keys."),
    Rule("Attention", _decomposable, "Give the node the attribute TRT_decomposable = 1."),
    Rule("Attention", _half_width, "Compute it in fp32 (--precision fp32)."),
    Rule("TensorScatter", _mode, "Use mode linear, and compact the cache outside the graph."),
    Rule("TensorScatter", _axis, "Give the cache as [batch, heads, length, width] and axis -2."),
    Rule("TensorScatter", _cache_input, "Make the cache an input of the graph, updated once."),
    Rule("TensorScatter", _one_update, "Write all new entries in one update."),
    Rule("TensorScatter", _cache_output, "Make the updated cache an output of the graph."),
    Rule("TensorScatter", _cache_length, "Fix the length in the input's shape."),
    Rule("TopK", _top_k, f"Ask for at most {LARGEST_TOP_K}."),
)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _int(node: ir.Node, name: str, default: int) -> int:
    return node.attributes.get_int(name, default)


def _rank(node: ir.Node) -> int | None:
    cache = _input(node, 0)
    return None if cache is None or cache.shape is None else len(cache.shape)


def _width(value: ir.Value | None) -> int | None:
    """The last dimension; inference loses it where a cache is cut to a length that data gives."""
    while value is not None:
        if value.shape is not None and isinstance(value.shape[-1], int):
            return value.shape[-1]
        producer = value.producer()
        if producer is None or producer.op_type not in ("Slice", "TensorScatter"):
            return None
        value = producer.inputs[0]
    return None
