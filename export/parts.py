"""The parts of a bundle that hold graphs: planned and checked first, written afterwards."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specexport.errors import ConfigError
from specexport.export.checkpoint import Checkpoint, TensorSource, open_checkpoint
from specexport.export.config import DecoderConfig
from specexport.export.decoder import EMBEDDING, LM_HEAD, build_decoder
from specexport.export.families import read_config
from specexport.export.graph_io import DecoderGraph
from specexport.export.heads.plan import HeadGraphs, HeadPlan
from specexport.export.layer_check import require_layers
from specexport.export.manifest import (
    FileEntry,
    FloatType,
    FunctionSpec,
    GraphSpec,
    HeadSpec,
    Tap,
    TensorSpec,
    hash_file,
)
from specexport.export.moe import is_router
from specexport.export.precision import Precision, WantedTypes
from specexport.export.quantize import Stored, quantize
from specexport.export.weights import check_tensors, weights_size, write_weights

DEFAULT_MAX_LENGTH = 8192
TARGET_FOLDER = "target"
"""Heads lie beside their target: ONNX Runtime lets a graph read weights of its own folder only."""
TOKEN_MAP = f"{TARGET_FOLDER}/token_map.npy"
_DTYPE_NAMES = {ir.DataType.FLOAT: "float32", ir.DataType.INT64: "int64", ir.DataType.BOOL: "bool"}

Progress = Callable[[str, int, int], None]
"""Called with what is written, the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the user asked for; None: as the checkpoint has it."""

    types: WantedTypes = field(default_factory=WantedTypes)
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A target or draft model's checkpoint, opened and read but not yet exported."""

    role: str
    checkpoint: Checkpoint
    config: DecoderConfig

    @classmethod
    def open(cls, source: str, role: str) -> "ModelSource":
        """Raises `CheckpointError` where it cannot be read."""
        checkpoint = open_checkpoint(source)
        return cls(role, checkpoint, _untie(read_config(checkpoint.config), checkpoint))

    def plan(self, sizes: Sizes, taps: tuple[Tap, ...] = ()) -> "ModelPart":
        """Build the graph and check everything that can be checked without reading the weights."""
        context = self.config.context_length
        max_length = sizes.max_length or min(context, DEFAULT_MAX_LENGTH)
        if self.role == TARGET_FOLDER and max_length > context:
            raise ConfigError(
                f"--max-length is {max_length}, but the model knows {context} positions "
                "(max_position_embeddings). Lower it."
            )
        max_length = min(max_length, context)
        require_layers(self.checkpoint, self.config)
        precision = Precision.of(sizes.types, own_weight_type(self.checkpoint))
        graph = build_decoder(self.config, precision.rest, max_length, taps)
        check_tensors(graph, self.checkpoint, self.config)
        return ModelPart(self, graph, quantize(graph, precision), max_length)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The graph of a target or a draft model."""

    source: ModelSource
    graph: DecoderGraph
    stored: Stored
    max_length: int

    @property
    def size_bytes(self) -> int:
        """What its weights will take."""
        return weights_size(self.graph)

    def write(self, bundle: Path, progress: Progress) -> dict[str, FileEntry]:
        """Write graph and weights; the hashes of the weights."""
        role = self.source.role
        (bundle / role).mkdir()
        what = f"Writing {role} weights"
        return _write(self.graph, self.source.checkpoint, bundle, f"{role}/model", what, progress)

    def spec(self) -> GraphSpec:
        """What the manifest says of the graph."""
        precision = self.stored.precision
        return _graph_spec(
            f"{self.source.role}/model.onnx",
            self.source.config,
            self.graph,
            (precision, precision.is_rounded(own_weight_type(self.source.checkpoint))),
            self.max_length,
        )


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The graphs of a drafting head, which share weights with the target's."""

    plan: HeadPlan
    graphs: HeadGraphs
    stored: dict[str, Stored]
    """By graph: head, fuse, medusa."""
    max_length: int

    @classmethod
    def of(cls, plan: HeadPlan, target: ModelPart, sizes: Sizes) -> "HeadPart":
        """Build the graphs; raises `CheckpointError` for a missing or unread tensor."""
        precision = Precision.of(sizes.types, own_weight_type(plan.tensors))
        graphs = plan.build(target.graph.builder, precision.rest, target.max_length)
        lender = (target.graph, target.stored)
        stored = {name: quantize(g, precision, lender) for name, g in _named(graphs).items()}
        return cls(plan, graphs, stored, target.max_length)

    @property
    def size_bytes(self) -> int:
        """What its own weights will take."""
        return sum(weights_size(graph) for graph in _named(self.graphs).values())

    @property
    def num_medusa_heads(self) -> int:
        """0 for a head of another kind."""
        if self.graphs.medusa is None:
            return 0
        shape = self.graphs.medusa.model.graph.outputs[0].shape
        assert shape is not None
        assert isinstance(shape[1], int)
        return shape[1]

    def write(self, bundle: Path, progress: Progress) -> dict[str, FileEntry]:
        """Write graphs and weights beside the target's, which are there; the weights' hashes."""
        files: dict[str, FileEntry] = {}
        for name, graph in _named(self.graphs).items():
            what = f"Writing {name} weights"
            path = f"{TARGET_FOLDER}/{name}"
            files |= _write(graph, self.plan.tensors, bundle, path, what, progress)
        if self.plan.token_map is not None:
            np.save(bundle / TOKEN_MAP, self.plan.token_map)
            files[TOKEN_MAP] = hash_file(bundle / TOKEN_MAP)
        return files

    def spec(self) -> HeadSpec:
        """What the manifest says of the head."""
        step, config = self.graphs.step, self.graphs.step_config
        return HeadSpec(
            layout=self.plan.layout,
            taps=self.plan.taps,
            tensors=dict(sorted((file, name) for name, file in self.plan.tensors.renamed.items())),
            step=_graph_spec(
                f"{TARGET_FOLDER}/head.onnx",
                config,
                step,
                self._precision("head"),
                self.max_length,
            )
            if step and config
            else None,
            fuse=self._function("fuse", self.graphs.fuse),
            medusa=self._function("medusa", self.graphs.medusa),
            token_map=None if self.plan.token_map is None else TOKEN_MAP,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to say of its graphs."""
        return tuple(note for stored in self.stored.values() for note in stored.notes)

    def _precision(self, name: str) -> tuple[Precision, bool]:
        """Of one graph, and whether it is rounded."""
        precision = self.stored[name].precision
        return precision, precision.is_rounded(own_weight_type(self.plan.tensors))

    def _function(self, name: str, graph: DecoderGraph | None) -> FunctionSpec | None:
        if graph is None:
            return None
        stored = self.stored[name]
        return FunctionSpec(
            path=f"{TARGET_FOLDER}/{name}.onnx",
            weight_type=stored.precision.body,
            lm_head_type=stored.precision.lm_head if "lm_head" in stored.roles else None,
            num_parameters=_num_parameters(graph),
            inputs=tuple(tensor_spec(value) for value in graph.model.graph.inputs),
            outputs=tuple(tensor_spec(value) for value in graph.model.graph.outputs),
        )


def _named(graphs: HeadGraphs) -> dict[str, DecoderGraph]:
    """Those that there are, by the names of their files."""
    named = {"head": graphs.step, "fuse": graphs.fuse, "medusa": graphs.medusa}
    return {name: graph for name, graph in named.items() if graph is not None}


def own_weight_type(tensors: TensorSource) -> FloatType:
    """The storage type of all matrices of the checkpoint, routers aside; fp32 if they differ."""
    matrices = [name for name in tensors.names() if len(tensors.shape(name)) > 1]
    types = {tensors.dtype(name) for name in matrices if not is_router(name)}
    if types == {"fp16"}:
        return "fp16"
    return "bf16" if types == {"bf16"} else "fp32"


def _write(
    graph: DecoderGraph,
    tensors: TensorSource,
    bundle: Path,
    path: str,
    what: str,
    progress: Progress,
) -> dict[str, FileEntry]:
    """Write `path`.weights, then `path`.onnx, which points there; the hash of the weights."""
    import onnx

    total, done = weights_size(graph), 0

    def advance(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress(what, done, total)

    weights = f"{path}.weights"
    entry = write_weights(graph, tensors, bundle / weights, advance)
    ir.save(graph.model, bundle / f"{path}.onnx")
    onnx.checker.check_model(str(bundle / f"{path}.onnx"))
    return {weights: entry}


def _graph_spec(
    path: str,
    config: DecoderConfig,
    graph: DecoderGraph,
    stored: tuple[Precision, bool],
    max_length: int,
) -> GraphSpec:
    precision, is_rounded = stored
    return GraphSpec(
        path=path,
        family=config.family,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_length=max_length,
        sliding_window=config.sliding_window,
        weight_type=precision.body,
        lm_head_type=precision.lm_head,
        embedding_type=precision.embedding,
        is_rounded=is_rounded,
        num_parameters=_num_parameters(graph),
        inputs=tuple(tensor_spec(value) for value in graph.model.graph.inputs),
        outputs=tuple(tensor_spec(value) for value in graph.model.graph.outputs),
    )


def _num_parameters(graph: DecoderGraph) -> int:
    """Of the graph's own weights, each counted once."""
    shapes = {weight.source: weight.shape for weight in graph.builder.weights.values()}
    return sum(int(np.prod(shape)) for shape in shapes.values())


def tensor_spec(value: ir.Value) -> TensorSpec:
    """What the manifest says of an input or output."""
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(name=value.name or "", dtype=_DTYPE_NAMES[value.dtype], shape=shape)


def _untie(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """Believe the file, as transformers does: a stored output matrix that differs is used."""
    if not config.tied_embeddings or LM_HEAD not in set(checkpoint.names()):
        return config
    if np.array_equal(checkpoint.tensor(LM_HEAD), checkpoint.tensor(EMBEDDING)):
        return config
    checkpoint.notes.append(
        f"config.json ties the embeddings, but {LM_HEAD} is stored and differs: it is used."
    )
    return replace(config, tied_embeddings=False)
