"""Checkpoint → bundle: graphs, weights, tokenizer and manifest, written whole or not at all."""

import os
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specexport.errors import CheckpointError, ConfigError
from specexport.export.checkpoint import Checkpoint
from specexport.export.decide.part import write_decide
from specexport.export.heads.plans import plan_head
from specexport.export.manifest import FileEntry, Manifest, Provenance, WeightType, hash_file
from specexport.export.methods import (
    Acceptance,
    DraftMethod,
    HeadMethod,
    LookupMethod,
    LosslessAcceptance,
    MedusaMethod,
    Method,
    NgramMethod,
    StaticTreeSpec,
)
from specexport.export.output import check_output, check_space, whole_or_nothing
from specexport.export.parts import HeadPart, ModelPart, ModelSource, Progress, Sizes
from specexport.export.precision import WantedTypes
from specexport.export.tensorrt.engines import add_engine
from specexport.export.tensorrt.timing_cache import Told
from specexport.export.tensorrt.wanted import WantedEngine
from specexport.export.vocabulary import check_tokenizer, require_same_vocabulary
from specexport.export.weights import MTP_NOTE

_PACKAGES = ("specexport", "onnx", "onnx_ir", "torch", "transformers", "safetensors", "gguf")
# A tree as small as a CPU wants it: the likeliest path, and second choices near its beginning.
_MEDUSA_CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What `build` makes of a checkpoint."""

    method: Method = field(default_factory=NgramMethod)
    draft: str | None = None
    """Checkpoint of the draft model; goes with `DraftMethod` alone."""
    head: str | None = None
    """Checkpoint of the head; method mtp needs none where the target holds the layer."""
    lookup: LookupMethod | None = None
    """Asked first; the method drafts where it finds nothing."""
    acceptance: Acceptance = field(default_factory=LosslessAcceptance)
    weight_type: WeightType | None = None
    """None keeps the checkpoint's own."""
    lm_head_type: WeightType | None = None
    """Of the output matrix; None: int8 where the others are int4, else as they are."""
    embedding_type: WeightType | None = None
    """None: the checkpoint's own where the others are codes, else as they are."""
    draft_weight_type: WeightType | None = None
    """Of the draft model or head; None: `weight_type`."""
    max_length: int | None = None
    """Prompt plus output tokens; None: the model's context, at most 8192."""
    engines: tuple[WantedEngine, ...] = ()
    """Built besides the graphs, which ONNX Runtime runs as they are."""
    overwrite: bool = False
    argv: tuple[str, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """Of the target."""
        types = WantedTypes(self.weight_type, self.lm_head_type, self.embedding_type)
        return Sizes(types, self.max_length)

    @property
    def draft_sizes(self) -> Sizes:
        """Of the draft model or head."""
        body = self.draft_weight_type or self.weight_type
        return Sizes(replace(self.sizes.types, body=body), self.max_length)

    @property
    def stored_types(self) -> frozenset[WeightType]:
        """Those asked for."""
        asked = (
            self.weight_type,
            self.lm_head_type,
            self.embedding_type,
            self.draft_weight_type,
        )
        return frozenset(each for each in asked if each is not None)

    def __post_init__(self) -> None:
        if (self.draft is not None) != isinstance(self.method, DraftMethod):
            raise ConfigError("Method draft needs a draft model, and only it takes one (--draft).")
        tree, given = getattr(self.method, "tree", None), self.method.model_fields_set
        if tree is not None and "num_speculative_tokens" in given:
            raise ConfigError(
                "A tree has a depth of its own. Leave out -k (num_speculative_tokens), or the tree."
            )
        _ = self.sizes  # refuses types that do not exist
        has_graph = isinstance(self.method, DraftMethod | HeadMethod | MedusaMethod)
        if self.draft_weight_type and not has_graph:
            raise ConfigError(
                f"--draft-weights has no meaning for method {self.method.kind}, which needs no "
                "weights. Leave it out."
            )
        if self.lookup and not has_graph:
            raise ConfigError(
                f"A lookup goes before a draft model or a head; method {self.method.kind} is none. "
                "Leave one of them out."
            )


def build(
    source: str,
    output: Path,
    options: BuildOptions = BuildOptions(),
    progress: Progress = lambda what, done, total: None,
    tell: Told = lambda what: None,
) -> Manifest:
    """Build a bundle from `source` (directory, hub id or GGUF file) at `output`.

    Raises `SpecExportError`; whatever happens, `output` is either whole or as it was.
    """
    output = Path(os.path.realpath(output))  # replace what a link points to, not the link
    kind, sizes, draft_sizes = options.method.kind, options.sizes, options.draft_sizes
    sources = [s for s in (source, options.draft, options.head) if s is not None]
    check_output(output, sources, overwrite=options.overwrite)
    for engine in options.engines:
        engine.resolve(options.stored_types)  # refuses what is missing before anything is written
    model = ModelSource.open(source, "target")
    plan = plan_head(kind, options.head, model.checkpoint, model.config)
    target = model.plan(sizes, plan.taps if plan else ())
    head = HeadPart.of(plan, target, draft_sizes) if plan else None
    draft = ModelSource.open(options.draft, "draft").plan(draft_sizes) if options.draft else None
    parts = [part for part in (target, head, draft) if part is not None]
    eos_token_ids = _eos_token_ids(model.checkpoint, model.config.vocab_size)
    check_space(output, sum(part.size_bytes for part in parts))
    with whole_or_nothing(output) as folder:
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        model.checkpoint.write_tokenizer(tokenizer)
        check_tokenizer(tokenizer, model.config.vocab_size)
        if draft is not None:
            own = draft.source
            require_same_vocabulary(tokenizer, own.checkpoint, own.config.vocab_size)
        # Weights are hashed while they are written, the other files at the end.
        written: dict[str, FileEntry] = {}
        for part in parts:
            written |= part.write(folder, progress)
        decide = write_decide(folder, model.config.vocab_size)
        manifest = Manifest(
            target=target.spec(),
            draft=draft.spec() if draft else None,
            head=head.spec() if head else None,
            decide=decide,
            method=_fitted(options.method, head),
            lookup=options.lookup,
            acceptance=options.acceptance,
            eos_token_ids=eos_token_ids,
            provenance=Provenance(
                checkpoint=_absolute(source),
                draft_checkpoint=_absolute(options.draft) if options.draft else None,
                head_checkpoint=_absolute(options.head) if options.head else None,
                notes=_notes(target, draft, head, kind),
                argv=options.argv,
                versions=_versions(),
            ),
            files={**_hash_small_files(folder), **written},
        )
        for engine in options.engines:
            manifest = add_engine(folder, manifest, engine, previous=output, tell=tell)
        manifest.write(folder)
    return manifest


def _fitted(method: Method, head: HeadPart | None) -> Method:
    """Medusa drafts as deep as it has heads; what is left open is chosen here."""
    if not isinstance(method, MedusaMethod):
        return method
    assert head is not None
    num_heads, given = head.num_medusa_heads, method.model_fields_set
    depth = method.num_speculative_tokens
    if method.tree is not None:
        depth = max(len(choice) for choice in method.tree.choices)
    elif "num_speculative_tokens" not in given:
        depth = min(depth, num_heads)
        tree = StaticTreeSpec(choices=tuple(c for c in _MEDUSA_CHOICES if len(c) <= depth))
        method = method.model_copy(update={"tree": tree})
    if depth > num_heads:
        raise ConfigError(
            f"Drafts of {depth} tokens were asked for, but there are {num_heads} Medusa heads, one "
            f"for each position. Ask for at most {num_heads}."
        )
    return method.model_copy(update={"num_speculative_tokens": depth})


def _notes(
    target: ModelPart, draft: ModelPart | None, head: HeadPart | None, method: str
) -> tuple[str, ...]:
    """What was decided on reading; an MTP layer that is used needs no hint that there is one."""
    models = [part for part in (target, draft) if part]
    notes = [note for part in models for note in part.source.checkpoint.notes]
    if method == "mtp":
        notes = [note for note in notes if note != MTP_NOTE]
    notes += [f"{part.source.role}: {note}" for part in models for note in part.stored.notes]
    return (*notes, *(head.plan.notes + head.notes if head else ()))


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
        if path.is_file() and path.suffix not in (".weights", ".npy")
    }


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
