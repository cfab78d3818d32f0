"""`validate --engine`: what of an engine can be proved here, and that half of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

from specexport.engines.available import EngineName, check_available
from specexport.engines.backend import Backend, open_backend
from specexport.engines.ort import OrtFunction, OrtRunner
from specexport.engines.plan import check_plan, installed_version
from specexport.engines.step import FunctionRunner, Profile, StepRunner
from specexport.errors import ConfigError
from specexport.export import engine_spec
from specexport.export.engine_spec import EngineSpec, FloatType
from specexport.export.manifest import DecideSpec, FunctionSpec, GraphSpec, read_manifest
from specexport.export.tensorrt.engines import add_engines
from specexport.export.tensorrt.wanted import WantedEngine
from specexport.gpu import find_gpu, local_gpu
from specexport.validation.engine_outputs import (
    TOLERANCES,
    Arrays,
    compare_outputs,
    function_outputs,
    make_feeds,
    step_outputs,
)
from specexport.validation.report import EngineReport, OutputReport

_NUM_TEXTS = 4


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """An engine that a bundle is validated on, and the GPUs that its plans are for."""

    bundle: Path
    engine: EngineName
    gpus: tuple[str, ...]
    precision: FloatType | None

    @classmethod
    def of(
        cls,
        bundle: Path,
        engine: EngineName,
        gpus: Sequence[str] = (),
        precision: FloatType | None = None,
    ) -> "EngineCheck":
        """Raises `ConfigError` at once for what cannot be proved here at all."""
        gpu = local_gpu()
        if not _has_plans(engine):
            if gpus or precision:
                raise ConfigError(
                    f"--gpu and --precision are for plans of TensorRT; {engine} has none."
                )
            check_available(engine)
            return cls(bundle, engine, (), None)
        if gpu is not None:
            check_available(engine)
        wanted = tuple(gpus) or ((gpu,) if gpu else _built_for(bundle, engine))
        check = cls(bundle, engine, wanted, precision)
        if check._find() is None:
            check._wanted().resolve(
                read_manifest(bundle).stored_types
            )  # the library, and that it builds for these GPUs
        return check

    def run(self, texts: Sequence[Sequence[int]]) -> EngineReport:
        """Build plans where they are missing, and compare outputs where there is a GPU."""
        built = self._find() or self._build() if _has_plans(self.engine) else None
        gpu = local_gpu()
        if gpu is None or (built is not None and gpu not in built.gpus):
            assert built is not None
            return self._report(built, None, [])
        precision = built.precision if built else "fp32"
        return self._report(built, str(find_gpu()), self._compare(texts, TOLERANCES[precision]))

    def _report(
        self, built: EngineSpec | None, gpu: str | None, outputs: list[OutputReport]
    ) -> EngineReport:
        return EngineReport(
            engine=self.engine,
            library_version=built.library_version if built else None,
            built_for=built.gpus if built else (),
            precision=built.precision if built else "fp32",
            compared_on=gpu,
            outputs=tuple(outputs),
            passed=all(output.passed for output in outputs),
        )

    def _find(self) -> EngineSpec | None:
        """The plans of these very graphs for all wanted GPUs, whole; None to build them."""
        backend, manifest = self._backend, read_manifest(self.bundle)
        for engine in manifest.engines:
            fits = engine.backend == backend and set(self.gpus) <= set(engine.gpus)
            same = engine.library_version == installed_version(backend)
            if self.gpus and fits and same and self.precision in (None, engine.precision):
                for plan in engine.plans.values():
                    check_plan(self.bundle, engine, plan)
                return engine
        return None

    def _build(self) -> EngineSpec:
        manifest = add_engines(self.bundle, [self._wanted()], lambda what: None)
        return manifest.engines[-1]

    def _wanted(self) -> WantedEngine:
        return WantedEngine(self._backend, self.gpus, self.precision)

    @property
    def _backend(self) -> engine_spec.Backend:
        return cast(engine_spec.Backend, self.engine)

    def _compare(self, texts: Sequence[Sequence[int]], tolerance: float) -> list[OutputReport]:
        manifest = read_manifest(self.bundle)
        backend = open_backend(self.engine, self.bundle, manifest)
        reports: list[OutputReport] = []
        feeds = {
            name: (spec, make_feeds(spec, texts[:_NUM_TEXTS]))
            for name, spec in manifest.graphs.items()
            if not isinstance(spec, DecideSpec)  # tokens are equal or not: nothing to tolerate
        }
        for name, (spec, own) in feeds.items():
            reports += _compare_graph(self.bundle, name, spec, backend, own, tolerance)
        return reports


def _compare_graph(
    bundle: Path,
    name: str,
    spec: GraphSpec | FunctionSpec,
    backend: Backend,
    feeds: Sequence[Arrays],
    tolerance: float,
) -> list[OutputReport]:
    """One graph on the engine against ONNX Runtime on the CPU, with integers multiplied out."""
    right: OrtFunction | OrtRunner
    other: FunctionRunner | StepRunner
    if isinstance(spec, FunctionSpec):
        right, other = OrtFunction(bundle / spec.path, dequantize=True), backend.function(name)
        infers = partial(function_outputs, right), partial(function_outputs, other)
    else:
        profile = Profile(max_slots=1, max_length=spec.max_length)
        right = OrtRunner(bundle / spec.path, spec, replace(profile, dequantize=True))
        other = backend.runner(name, profile)
        infers = partial(step_outputs, right), partial(step_outputs, other)
    try:
        return compare_outputs(name, *infers, feeds, tolerance)
    finally:
        right.close()
        other.close()


def _has_plans(engine: EngineName) -> bool:
    return engine in get_args(engine_spec.Backend)


def _built_for(bundle: Path, engine: EngineName) -> tuple[str, ...]:
    """The GPUs of the engine that the bundle has already; none where it has none."""
    engines = [e for e in read_manifest(bundle).engines if e.backend == engine]
    return engines[0].gpus if engines else ()
