"""Write a graph's weights: one external data file, streamed tensor by tensor."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from specexport.errors import CheckpointError
from specexport.export.blocks import pack_int4, quantize
from specexport.export.checkpoint import Checkpoint, TensorSource, as_dtype
from specexport.export.config import DecoderConfig
from specexport.export.graph_io import DecoderGraph
from specexport.export.layers import DATA_TYPES, Weight, initializer_names
from specexport.export.manifest import FileEntry
from specexport.export.mtp_tensors import mtp_tensors
from specexport.export.precision import has_codes

_ALIGNMENT = 4096  # a page, so that engines can map tensors
_BLOCK_BYTES = 1 << 26

MTP_NOTE = "The checkpoint holds a multi-token-prediction module; --method mtp uses it."

# Tensors that some checkpoints carry and no forward pass reads.
UNREAD_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".self_attn.bias")


def check_tensors(graph: DecoderGraph, checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Raise `CheckpointError` for a missing or unread tensor or one of the wrong shape.

    A multi-token-prediction module is left out with a note.
    """
    names = set(checkpoint.names())
    needed = {weight.source for weight in graph.builder.weights.values()}
    if missing := sorted(needed - names):
        raise CheckpointError(
            f"{checkpoint.source} lacks {len(missing)} tensor(s) that its config calls for, "
            f"first {missing[0]!r}. Is the download complete, and config.json of this model?"
        )
    ignorable = {"lm_head.weight"} if config.tied_embeddings else set()
    if mtp := mtp_tensors(names - needed, config.num_layers):
        checkpoint.notes.append(MTP_NOTE)
    spare = names - needed - ignorable - mtp
    unread = [n for n in sorted(spare) if not n.endswith(UNREAD_SUFFIXES)]
    if unread:
        raise CheckpointError(
            f"{checkpoint.source} holds {len(unread)} tensor(s) that its config does not call for, "
            f"first {unread[0]!r}. Running without them would give another model: is config.json "
            "of this model?"
        )
    for weight in graph.builder.weights.values():
        if (shape := checkpoint.shape(weight.source)) != weight.shape:
            raise CheckpointError(
                f"{weight.source} has shape {list(shape)}; config.json calls for "
                f"{list(weight.shape)}. The weights and config.json are of different models."
            )


def weights_size(graph: DecoderGraph) -> int:
    """Bytes that `write_weights` will write, padding aside."""
    return sum(_nbytes(value) for value in _initializers(graph))


def write_weights(
    graph: DecoderGraph,
    checkpoint: TensorSource,
    path: Path,
    advance: Callable[[int], None] = lambda size_bytes: None,
) -> FileEntry:
    """Stream all weights into `path` and point the graph's initializers there.

    `advance` is called with the bytes just written. Memory stays near the largest tensor.
    Borrowed weights point into their lender's file, which must lie in the same folder and have
    been written.
    """
    for name, lent in graph.builder.borrowed.items():
        graph.model.graph.initializers[name].const_value = lent.const_value
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for value, array in _arrays(graph, checkpoint):
            offset = _pad(file, digest)
            _write(file, digest, array, advance)
            value.const_value = ir.ExternalTensor(
                path.name,
                offset,
                array.nbytes,
                value.dtype or ir.DataType.FLOAT,
                shape=ir.Shape(value.shape or array.shape),
                name=value.name or "",
                base_dir=path.parent,
            )
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size_bytes=path.stat().st_size, sha256=digest.hexdigest())


def _arrays(
    graph: DecoderGraph, checkpoint: TensorSource
) -> Iterator[tuple[ir.Value, np.ndarray[Any, Any]]]:
    """Each initializer, in the order of the file, and its numbers."""
    known = graph.model.graph.initializers
    for name, weight in graph.builder.weights.items():
        arrays = _read(weight, checkpoint)
        yield from zip(_values(graph, name, weight), arrays, strict=True)
    for name, table in graph.builder.tables.items():
        yield known[name], np.ascontiguousarray(table)


def _read(weight: Weight, checkpoint: TensorSource) -> list[np.ndarray[Any, Any]]:
    """The one array, or codes and scales."""
    tensor = checkpoint.tensor(weight.source)
    if has_codes(code_type := weight.weight_type):
        codes, scales = quantize(tensor, code_type, weight.source)
        del tensor
        codes, scales = _oriented(codes, weight), _oriented(scales, weight)
        return [pack_int4(codes) if code_type == "int4" else codes, scales]
    tensor = as_dtype(tensor, weight.weight_type, weight.source)
    if (rows := weight.head_rows) is not None:
        blocks = tensor.reshape(rows.num_heads, -1, *tensor.shape[1:])
        tensor = blocks[:, rows.start : rows.stop]
    return [_oriented(tensor, weight)]


def _oriented(array: np.ndarray[Any, Any], weight: Weight) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.swapaxes(array, -1, -2) if weight.transpose else array)


def _write(
    file: BinaryIO,
    digest: "hashlib._Hash",
    array: np.ndarray[Any, Any],
    advance: Callable[[int], None],
) -> None:
    data = array.view(np.uint8).reshape(-1)
    for start in range(0, len(data), _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES].data
        file.write(block)
        digest.update(block)
        advance(len(block))


def _pad(file: BinaryIO, digest: "hashlib._Hash") -> int:
    padding = bytes(-file.tell() % _ALIGNMENT)
    file.write(padding)
    digest.update(padding)
    return file.tell()


def _initializers(graph: DecoderGraph) -> list[ir.Value]:
    known = graph.model.graph.initializers
    tables = [known[name] for name in graph.builder.tables]
    weights = graph.builder.weights.items()
    return [value for name, weight in weights for value in _values(graph, name, weight)] + tables


def _values(graph: DecoderGraph, name: str, weight: Weight) -> list[ir.Value]:
    known = graph.model.graph.initializers
    return [known[n] for n in initializer_names(name, weight)]


def _nbytes(value: ir.Value) -> int:
    dtype = value.dtype or DATA_TYPES["fp32"]
    assert value.shape is not None
    return int(np.prod(value.shape.numpy()) * dtype.bitwidth // 8)
