"""The engines of a bundle: a plan of each graph, beside the graphs and in the manifest."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from specexport.export.engine_spec import EngineSpec, FloatType
from specexport.export.manifest import GraphSpec, Manifest, read_manifest, verify_files
from specexport.export.output import whole_or_nothing
from specexport.export.tensorrt.maker import PlanMaker, known_plans
from specexport.export.tensorrt.timing_cache import Told
from specexport.export.tensorrt.wanted import WantedEngine


def add_engines(bundle: Path, wanted: Sequence[WantedEngine], tell: Told) -> Manifest:
    """Build engines of a bundle that is there, in place; its manifest with them, written."""
    manifest = read_manifest(bundle)
    for engine in wanted:
        engine.resolve(manifest.stored_types)
    verify_files(bundle, manifest)
    for engine in wanted:
        manifest = add_engine(bundle, manifest, engine, previous=bundle, tell=tell)
        manifest.write(bundle)
    return manifest


def add_engine(
    bundle: Path, manifest: Manifest, wanted: WantedEngine, previous: Path, tell: Told
) -> Manifest:
    """Build the plans of all graphs of `bundle`; the manifest with them, which is not written.

    A plan of the bundle at `previous` is taken over where all that it was made of is the same.
    """
    engine, makers = plan_makers(bundle, manifest, wanted)
    known, engines = known_plans(previous), bundle / "engines"
    engines.mkdir(exist_ok=True)
    try:
        with whole_or_nothing(bundle / engine.folder) as folder:
            plans = {}
            for name, maker in makers.items():
                tell(f"Building the {engine.backend} plan of {name} for {', '.join(engine.gpus)}")
                plans[name] = maker.write(folder / f"{name}.plan", known, tell)
    finally:
        with suppress(OSError):  # other engines are there
            engines.rmdir()
    engine = engine.model_copy(update={"plans": plans})
    others = (other for other in manifest.engines if other.folder != engine.folder)
    return manifest.model_copy(update={"engines": (*others, engine)})


def plan_makers(
    bundle: Path, manifest: Manifest, wanted: WantedEngine
) -> tuple[EngineSpec, dict[str, PlanMaker]]:
    """The engine without its plans, and what makes the plan of each graph."""
    library, gpus = wanted.resolve(manifest.stored_types)
    engine = EngineSpec(
        backend=library.backend,
        library_version=library.version,
        gpus=gpus,
        precision=wanted.precision or _own_precision(manifest.target),
        weight_streaming=wanted.weight_streaming,
        plans={},
    )
    names = manifest.graphs
    return engine, {
        name: PlanMaker(library, engine, bundle, manifest, wanted, name) for name in names
    }


def _own_precision(spec: GraphSpec) -> FloatType:
    """As the matrices are stored; codes are multiplied out to fp16."""
    stored = spec.weight_type
    return stored if stored in get_args(FloatType) else "fp16"  # type: ignore[return-value]
