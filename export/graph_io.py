"""Inputs and outputs that every graph with a key-value cache has, and how a graph is closed."""

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from specexport.export.config import DecoderConfig
from specexport.export.layers import GraphBuilder, StepValues
from specexport.export.rope import rotary_tables

_IR_VERSION = 11

CachePair = tuple[ir.Value, ...]
"""Key and value of one layer, each [B, Hkv, S, D]; with latent attention the key alone."""


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """The graph without weight data, and the recipes that produce the data."""

    model: ir.Model
    builder: GraphBuilder


def close_graph(
    g: GraphBuilder, inputs: Iterable[ir.Value], outputs: Iterable[ir.Value]
) -> DecoderGraph:
    """The finished graph of all that was added to `g`."""
    graph = g.graph(list(inputs), list(outputs))
    return DecoderGraph(ir.Model(graph, ir_version=_IR_VERSION, producer_name="specexport"), g)


def step_values(g: GraphBuilder, config: DecoderConfig, max_length: int) -> StepValues:
    """Positions, write indices and mask as new inputs; rotary tables for `max_length` positions."""
    mask = graph_input("attention_mask", ir.DataType.BOOL, "batch", 1, "query", "valid_length")
    cos, sin = rotary_tables(config.rope, config.rotary_dim, max_length)
    return StepValues(
        position_ids=graph_input("position_ids", ir.DataType.INT64, "batch", "query"),
        write_indices=graph_input("write_indices", ir.DataType.INT64, "batch"),
        attention_mask=mask,
        valid_length=g.op("Shape", mask, start=3, end=4),
        cos=g.table("rotary.cos", cos),
        sin=g.table("rotary.sin", sin),
    )


def cache_inputs(config: DecoderConfig) -> list[CachePair]:
    """`past_key_values.{i}.key` and `.value` (or only the first) of every layer."""
    shape = _cache_shape(config)
    return [
        tuple(
            graph_input(f"past_key_values.{i}.{kind}", ir.DataType.FLOAT, *shape)
            for kind in config.cache_kinds
        )
        for i in range(config.num_layers)
    ]


def cache_outputs(config: DecoderConfig, presents: Iterable[CachePair]) -> list[ir.Value]:
    """The updated caches as `present.{i}.key` and `.value`, in the order of `cache_inputs`."""
    return [
        graph_output(value, f"present.{i}.{kind}", *_cache_shape(config))
        for i, pair in enumerate(presents)
        for value, kind in zip(pair, config.cache_kinds, strict=True)
    ]


def graph_input(name: str, dtype: ir.DataType, *shape: str | int) -> ir.Value:
    """A new graph input; dimensions with a name are dynamic."""
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def graph_output(
    value: ir.Value, name: str, *shape: str | int, dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.Value:
    """Make `value` the graph output `name`."""
    value.name, value.shape = name, ir.Shape(shape)
    value.type = ir.TensorType(dtype)
    return value


def _cache_shape(config: DecoderConfig) -> tuple[str | int, ...]:
    return ("batch", config.num_kv_heads, "cache_length", config.head_dim)
