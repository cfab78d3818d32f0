"""What a bundle says of itself: `manifest.json`, read by the engines and written by `build`."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from specexport.errors import BundleError
from specexport.export.engine_spec import EngineSpec
from specexport.export.manifest_check import check_graph, check_head, check_manifest
from specexport.export.methods import (
    Acceptance,
    Frozen,
    LookupMethod,
    LosslessAcceptance,
    Method,
)

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer/tokenizer.json"

FloatType = Literal["fp32", "fp16", "bf16"]
CodeType = Literal["int8", "int4", "fp8"]
"""Codes in blocks of 32 with a scale each (`export/blocks.py`)."""
WeightType = FloatType | CodeType
"""How matrices are stored."""
WEIGHT_TYPES: tuple[WeightType, ...] = (*get_args(FloatType), *get_args(CodeType))

FINAL_NORM: Literal["norm"] = "norm"
Tap = int | Literal["norm"]
"""A hidden state of the target: the residual stream after layer i, counted from 0 (-1: the
embedding), or after the final norm."""

RACE_BLOCK = 64
"""Draws are a race of blocks of so many token ids, then one within the block that wins."""
MOST_CANDIDATES = 1024
"""The decide graph looks at so many likeliest tokens where top-k and top-p need an order."""


def max_adjusted(vocab_size: int, max_length: int) -> int:
    """Tokens of a row whose logits options may change, where the decide graph is a plan."""
    return min(vocab_size, max_length)


Size = Annotated[int, Field(gt=0, le=2**31 - 1)]


class TensorSpec(Frozen):
    """One graph input or output; a named dimension is dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def width(self) -> int:
        """The last dimension; 0 where it is dynamic."""
        size = self.shape[-1] if self.shape else 0
        return size if isinstance(size, int) else 0


def _named_types(
    body: WeightType, lm_head: WeightType | None, embedding: WeightType | None = None
) -> str:
    others = {"lm_head": lm_head, "embedding": embedding}
    named = [f"{name} {other}" for name, other in others.items() if other not in (None, body)]
    return ", ".join([body, *named])


class GraphSpec(Frozen):
    """One exported decoder graph: what an engine must know to run it."""

    path: str = Field(description="ONNX file, relative to the bundle")
    family: str
    architecture: str
    vocab_size: Size
    hidden_size: Size
    num_layers: Size
    num_kv_heads: Size
    head_dim: Size
    max_length: Size = Field(description="positions that the rotary tables hold")
    sliding_window: Size | None = None
    weight_type: WeightType
    lm_head_type: WeightType | None = None
    """Of the output matrix; None: weight_type."""
    embedding_type: WeightType | None = None
    is_rounded: bool = Field(description="weights were stored in fewer bits than the checkpoint's")
    num_parameters: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def stored_as(self) -> str:
        """The types of all matrices, for people: "int8, embedding bf16"."""
        return _named_types(self.weight_type, self.lm_head_type, self.embedding_type)

    @property
    def stored_types(self) -> frozenset[WeightType]:
        """The types of all matrices."""
        named = (self.weight_type, self.lm_head_type, self.embedding_type)
        return frozenset(each for each in named if each is not None)

    @property
    def is_quantized(self) -> bool:
        """Whether some matrices are stored as codes and scales."""
        return not self.stored_types.isdisjoint(get_args(CodeType))

    @property
    def computes_in_fp32(self) -> bool:
        """False where products on a CPU are of integers, which rounds the activations too."""
        has_integers = not {self.weight_type, self.lm_head_type}.isdisjoint({"int8", "int4"})
        return not has_integers or "fp8" in self.stored_types  # then all is multiplied out

    @property
    def cache_kinds(self) -> tuple[str, ...]:
        """Names of a layer's cache tensors: key and value, or key alone."""
        prefix = "past_key_values.0."
        names = (tensor.name for tensor in self.inputs)
        return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    @property
    def is_head(self) -> bool:
        """Whether it is the step of a head, which takes hidden states."""
        return any(tensor.name == "hidden_states" for tensor in self.inputs)

    @property
    def tap_width(self) -> int:
        """Numbers of the hidden states that it gives to a head; 0 where there are none."""
        return next((t.width for t in self.outputs if t.name == "hidden_states"), 0)

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        check_graph(self)
        return self


class FunctionSpec(Frozen):
    """One exported graph without a cache: arrays in, arrays out."""

    path: str = Field(description="ONNX file, relative to the bundle")
    weight_type: WeightType
    lm_head_type: WeightType | None = None
    """Of the output matrices; None: weight_type, or there are none."""
    num_parameters: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def input_width(self) -> int:
        """Numbers of a row that it reads; 0 where that is not known."""
        return self.inputs[0].width if self.inputs else 0

    @property
    def output_width(self) -> int:
        """Numbers of a row that it gives; 0 where that is not known."""
        return self.outputs[0].width if self.outputs else 0

    @property
    def stored_types(self) -> frozenset[WeightType]:
        """The types of all matrices."""
        return frozenset({self.weight_type, self.lm_head_type or self.weight_type})

    @property
    def stored_as(self) -> str:
        """The types of all matrices, for people."""
        return _named_types(self.weight_type, self.lm_head_type)


class DecideSpec(Frozen):
    """The graph that makes tokens of the target's logits (`export/decide/graph.py`)."""

    path: str = Field(description="ONNX file, relative to the bundle")
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def vocab_size(self) -> int:
        """V of the logits, the first input; 0 where that is not known."""
        return self.inputs[0].width if self.inputs else 0

    @property
    def stored_as(self) -> str:
        """For people: it has no weights."""
        return "–"

    @property
    def stored_types(self) -> frozenset[WeightType]:
        """None: it has no weights."""
        return frozenset()


AnySpec = GraphSpec | FunctionSpec | DecideSpec


class HeadSpec(Frozen):
    """A drafting head: its graphs and what became of its checkpoint."""

    layout: str
    """What the checkpoint was recognised as."""
    taps: tuple[Tap, ...]
    """Hidden states that the target's graph gives it, in this order."""
    tensors: dict[str, str]
    """The checkpoint's name of each tensor → the graphs'."""
    step: GraphSpec | None = None
    """EAGLE, MTP: one draft step over a cache of its own."""
    fuse: FunctionSpec | None = None
    """EAGLE-3: taps → features."""
    medusa: FunctionSpec | None = None
    """Medusa: hidden state → logits of every head."""
    token_map: str | None = None
    """A file of int64 (NumPy's .npy): the target's id of each draft id."""

    @property
    def num_heads(self) -> int:
        """Of Medusa; 0 for a head of another kind."""
        shape = self.medusa.outputs[0].shape if self.medusa and self.medusa.outputs else ()
        return shape[1] if len(shape) > 1 and isinstance(shape[1], int) else 0

    @property
    def vocab_size(self) -> int:
        """V_draft."""
        if self.step is not None:
            return self.step.vocab_size
        return self.medusa.output_width if self.medusa else 0

    @property
    def input_width(self) -> int:
        """Numbers of the target's hidden states, all taps together, that it reads."""
        function = self.fuse or self.medusa
        if function is not None:
            return function.input_width
        return self.step.hidden_size if self.step else 0

    @model_validator(mode="after")
    def _check_graphs(self) -> Self:
        check_head(self)
        return self


class FileEntry(Frozen):
    """Size and SHA-256 of one file of the bundle."""

    size_bytes: int
    sha256: str


class Provenance(Frozen):
    """Where a bundle comes from."""

    checkpoint: str
    draft_checkpoint: str | None = None
    head_checkpoint: str | None = None
    notes: tuple[str, ...] = ()
    """What was decided about the checkpoints on reading them."""
    argv: tuple[str, ...] = ()
    versions: dict[str, str]


class Manifest(Frozen):
    """The whole of `manifest.json`."""

    schema_version: int = SCHEMA_VERSION
    target: GraphSpec
    draft: GraphSpec | None = None
    head: HeadSpec | None = None
    decide: DecideSpec | None = None
    """None in bundles of earlier versions."""
    method: Method
    lookup: LookupMethod | None = None
    """Asked first; the method drafts where it finds nothing."""
    acceptance: Acceptance = LosslessAcceptance()
    eos_token_ids: tuple[int, ...]
    provenance: Provenance
    files: dict[str, FileEntry]
    engines: tuple[EngineSpec, ...] = ()
    """Their plans are not among `files`: a machine needs those of its own GPU alone."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        """Every file lies inside the bundle, and every graph's files are among the hashed ones."""
        plans = (plan.path for engine in self.engines for plan in engine.plans.values())
        for name in (*self.files, *plans):
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts or len(name) > 200:
                raise ValueError(f"{name[:80]!r} is no path inside the bundle")
        for name in (*self._graph_files(), TOKENIZER_NAME):
            if name not in self.files:
                raise ValueError(f"{name} is not among its files")
        return self

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        """What the method needs is there."""
        head = self.head
        found = {
            "draft": self.draft,
            "medusa": head and head.medusa,
            **dict.fromkeys(("eagle", "eagle3", "mtp"), head and head.step),
        }
        if self.method.kind in found and found[self.method.kind] is None:
            raise ValueError(f"method {self.method.kind} lacks its graph")
        return self

    @model_validator(mode="after")
    def _check_fit(self) -> Self:
        check_manifest(self)
        return self

    @property
    def graphs(self) -> dict[str, AnySpec]:
        """All graphs: target, and what there is of draft, head, fuse, medusa and decide."""
        head = self.head
        named: dict[str, AnySpec | None] = {
            "target": self.target,
            "draft": self.draft,
            "head": head.step if head else None,
            "fuse": head.fuse if head else None,
            "medusa": head.medusa if head else None,
            "decide": self.decide,
        }
        return {name: spec for name, spec in named.items() if spec is not None}

    @property
    def stored_types(self) -> frozenset[WeightType]:
        """The types of all matrices of all graphs."""
        return frozenset().union(*(spec.stored_types for spec in self.graphs.values()))

    def _graph_files(self) -> Iterator[str]:
        for spec in self.graphs.values():
            yield spec.path
            if not isinstance(spec, DecideSpec):
                yield str(PurePosixPath(spec.path).with_suffix(".weights"))
        if self.head and self.head.token_map:
            yield self.head.token_map

    def write(self, bundle: Path) -> None:
        """Write `manifest.json` into `bundle`, whole or not at all."""
        temporary = bundle / f".{MANIFEST_NAME}.tmp"
        temporary.write_text(self.model_dump_json(indent=2) + "\n")
        temporary.replace(bundle / MANIFEST_NAME)


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(size_bytes=path.stat().st_size, sha256=digest)


def read_manifest(bundle: Path) -> Manifest:
    """Read and check `manifest.json` alone; the other files are checked by `verify_files`."""
    path = bundle / MANIFEST_NAME
    if not path.is_file():
        what = "is not a directory" if not bundle.is_dir() else f"holds no {MANIFEST_NAME}"
        raise BundleError(
            f"{bundle} {what}, so it is no specexport bundle. "
            f"Make one with: specexport build MODEL -o {bundle}"
        )
    try:
        raw: Any = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Build the bundle again.") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version!r}; this specexport reads version "
            f"{SCHEMA_VERSION}. Install a matching specexport or build the bundle again."
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        where = f" at {place!r}" if place else ""  # some errors are of the whole
        reason = first["msg"].removeprefix("Value error, ")
        raise BundleError(f"{path} is damaged{where}: {reason}. Build the bundle again.") from None


def verify_files(bundle: Path, manifest: Manifest, names: Sequence[str] | None = None) -> None:
    """Raise `BundleError` unless every listed file has the size and the hash of the manifest."""
    for name in manifest.files if names is None else names:
        expected, path = manifest.files[name], bundle / name
        if not path.is_file():
            raise BundleError(
                f"{path} is missing, though {MANIFEST_NAME} lists it. "
                "Copy the bundle again, or build it again."
            )
        size_bytes = os.stat(path).st_size
        if size_bytes != expected.size_bytes:
            raise BundleError(
                f"{path} has {size_bytes} bytes; {MANIFEST_NAME} says {expected.size_bytes}. "
                "Copy the bundle again, or build it again."
            )
        if hash_file(path).sha256 != expected.sha256:
            raise BundleError(
                f"{path} was changed after the build: its SHA-256 differs from {MANIFEST_NAME}. "
                "Copy the bundle again, or build it again."
            )
