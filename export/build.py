"""Checkpoint → bundle: graphs, weights, tokenizer and manifest, written whole or not at all."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specexport.errors import CheckpointError, ConfigError
from specexport.export.checkpoint import Checkpoint, open_checkpoint
from specexport.export.config import DecoderConfig
from specexport.export.decoder import EMBEDDING, LM_HEAD, build_decoder
from specexport.export.families import read_config
from specexport.export.graph_io import DecoderGraph
from specexport.export.manifest import (
    DraftMethod,
    FileEntry,
    GraphSpec,
    Manifest,
    Method,
    NgramMethod,
    Provenance,
    TensorSpec,
    WeightType,
    hash_file,
)
from specexport.export.moe import is_router
from specexport.export.output import check_output, check_space, whole_or_nothing
from specexport.export.vocabulary import check_tokenizer, require_same_vocabulary
from specexport.export.weights import check_tensors, weights_size, write_weights

DEFAULT_MAX_LENGTH = 8192
_DTYPE_NAMES = {ir.DataType.FLOAT: "float32", ir.DataType.INT64: "int64", ir.DataType.BOOL: "bool"}
_PACKAGES = ("specexport", "onnx", "onnx_ir", "torch", "transformers", "safetensors", "gguf")

Progress = Callable[[str, int, int], None]
"""Called with what is written, the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What `build` makes of a checkpoint."""

    method: Method = field(default_factory=NgramMethod)
    draft: str | None = None
    """Checkpoint of the draft model; goes with `DraftMethod` alone."""
    weight_type: WeightType | None = None
    """None keeps the checkpoint's own."""
    max_length: int | None = None
    """Prompt plus output tokens; None: the model's context, at most 8192."""
    overwrite: bool = False
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.draft is not None) != isinstance(self.method, DraftMethod):
            raise ConfigError("Method draft needs a draft model, and only it takes one (--draft).")


def build(
    source: str,
    output: Path,
    options: BuildOptions = BuildOptions(),
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Build a bundle from `source` (directory, hub id or GGUF file) at `output`.

    Raises `SpecExportError`; whatever happens, `output` is either whole or as it was.
    """
    output = Path(os.path.realpath(output))  # replace what a link points to, not the link
    sources = [source] if options.draft is None else [source, options.draft]
    check_output(output, sources, overwrite=options.overwrite)
    target = _Part.plan(source, "target", options)
    draft = _Part.plan(options.draft, "draft", options) if options.draft is not None else None
    parts = [part for part in (target, draft) if part is not None]
    eos_token_ids = _eos_token_ids(target.checkpoint, target.config.vocab_size)
    check_space(output, sum(weights_size(part.graph) for part in parts))
    with whole_or_nothing(output) as folder:
        target.checkpoint.write_tokenizer(_make(folder / "tokenizer"))
        check_tokenizer(folder / "tokenizer", target.config.vocab_size)
        if draft is not None:
            require_same_vocabulary(folder / "tokenizer", draft.checkpoint, draft.config.vocab_size)
        # Weights are hashed while they are written, the other files at the end.
        weights = {part.weights_name: part.write(folder, progress) for part in parts}
        files = {**_hash_small_files(folder), **weights}
        manifest = Manifest(
            target=target.spec(),
            draft=draft.spec() if draft is not None else None,
            method=options.method,
            eos_token_ids=eos_token_ids,
            provenance=Provenance(
                checkpoint=_absolute(source),
                draft_checkpoint=_absolute(options.draft) if options.draft else None,
                notes=tuple(note for part in parts for note in part.checkpoint.notes),
                argv=options.argv,
                versions=_versions(),
            ),
            files=files,
        )
        manifest.write(folder)
    return manifest


@dataclass(frozen=True, slots=True)
class _Part:
    """One graph of the bundle, planned before anything is written."""

    role: str
    checkpoint: Checkpoint
    config: DecoderConfig
    graph: DecoderGraph
    weight_type: WeightType
    max_length: int

    @classmethod
    def plan(cls, source: str, role: str, options: BuildOptions) -> "_Part":
        """Open and check everything that can be checked without reading the weights."""
        checkpoint = open_checkpoint(source)
        config = _untie(read_config(checkpoint.config), checkpoint)
        context = config.context_length
        max_length = options.max_length or min(context, DEFAULT_MAX_LENGTH)
        if role == "target" and max_length > context:
            raise ConfigError(
                f"--max-length is {max_length}, but the model knows {context} positions "
                "(max_position_embeddings). Lower it."
            )
        max_length = min(max_length, context)
        weight_type = options.weight_type or _own_weight_type(checkpoint)
        graph = build_decoder(config, weight_type, max_length)
        check_tensors(graph, checkpoint, config)
        return cls(role, checkpoint, config, graph, weight_type, max_length)

    @property
    def weights_name(self) -> str:
        return f"{self.role}/model.weights"

    def write(self, folder: Path, progress: Progress) -> FileEntry:
        """Write graph and weights into `folder`; size and hash of the weights."""
        import onnx

        path = _make(folder / self.role) / "model.onnx"
        total, done = weights_size(self.graph), 0

        def advance(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            progress(f"Writing {self.role} weights", done, total)

        entry = write_weights(self.graph, self.checkpoint, folder / self.weights_name, advance)
        ir.save(self.graph.model, path)
        onnx.checker.check_model(str(path))
        return entry

    def spec(self) -> GraphSpec:
        """What the manifest says of the graph."""
        config, graph = self.config, self.graph.model.graph
        sources = {w.source: w.shape for w in self.graph.builder.weights.values()}
        return GraphSpec(
            path=f"{self.role}/model.onnx",
            family=config.family,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_length=self.max_length,
            sliding_window=config.sliding_window,
            weight_type=self.weight_type,
            is_rounded=self.weight_type not in ("fp32", _own_weight_type(self.checkpoint)),
            num_parameters=sum(_product(shape) for shape in sources.values()),
            inputs=tuple(_tensor_spec(value) for value in graph.inputs),
            outputs=tuple(_tensor_spec(value) for value in graph.outputs),
        )


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _tensor_spec(value: ir.Value) -> TensorSpec:
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(name=value.name or "", dtype=_DTYPE_NAMES[value.dtype], shape=shape)


def _own_weight_type(checkpoint: Checkpoint) -> WeightType:
    """The storage type of all matrices of the checkpoint, routers aside; fp32 if they differ."""
    matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) > 1]
    types = {checkpoint.dtype(name) for name in matrices if not is_router(name)}
    if types == {"fp16"}:
        return "fp16"
    return "bf16" if types == {"bf16"} else "fp32"


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


def _eos_token_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json decides, config.json where it is silent."""
    for name in ("generation_config", "config"):
        found = getattr(checkpoint, name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if found is None or found == []:
            continue
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise CheckpointError(
                f"{name}.json: eos_token_id is {found!r}; it must be a token id (or a list of "
                f"them) from 0 to {vocab_size - 1}."
            )
        return tuple(ids)
    return ()


def _hash_small_files(folder: Path) -> dict[str, FileEntry]:
    return {
        str(path.relative_to(folder)): hash_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".weights"
    }


def _make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _absolute(source: str) -> str:
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
