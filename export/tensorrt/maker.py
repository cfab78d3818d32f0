"""The plan of one graph: its form, its key, and a build where no plan has that key."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx_ir as ir

from specexport.errors import BundleError, EngineError
from specexport.export.engine_spec import EngineSpec, PlanSpec
from specexport.export.manifest import (
    AnySpec,
    GraphSpec,
    Manifest,
    hash_file,
    read_manifest,
)
from specexport.export.tensorrt.compute_type import ComputeType
from specexport.export.tensorrt.form import TensorRTForm
from specexport.export.tensorrt.library import Library
from specexport.export.tensorrt.lint import lint
from specexport.export.tensorrt.plan import PlanOptions, build_plan
from specexport.export.tensorrt.profiles import Limits, make_profiles
from specexport.export.tensorrt.timing_cache import Told
from specexport.export.tensorrt.wanted import WantedEngine


@dataclass(frozen=True, slots=True)
class PlanMaker:
    """Makes the plan of one graph of a bundle."""

    library: Library
    engine: EngineSpec
    bundle: Path
    manifest: Manifest
    wanted: WantedEngine
    name: str

    @property
    def spec(self) -> AnySpec:
        """The graph's."""
        return self.manifest.graphs[self.name]

    def write(
        self,
        path: Path,
        known: dict[str, tuple[Path, PlanSpec]],
        tell: Told = lambda what: None,
    ) -> PlanSpec:
        """Write the plan, or take one of `known` by its key."""
        limits, options = self._limits(), self._options()
        graph = self.bundle / self.spec.path
        model = self._form(graph, limits)
        key = self._key(model, options)
        graph_sha256 = self.manifest.files[self.spec.path].sha256
        final = f"{self.engine.folder}/{path.name}"
        if key in known and _link(*known[key], path):
            own = {"path": final, "graph_sha256": graph_sha256}
            return known[key][1].model_copy(update=own)
        built = build_plan(self.library, model, graph, options, tell)
        path.write_bytes(built.data)
        entry = hash_file(path)
        return PlanSpec(
            path=final,
            size_bytes=entry.size_bytes,
            sha256=entry.sha256,
            key=key,
            graph_sha256=graph_sha256,
            cache_length=limits.cache_length if isinstance(self.spec, GraphSpec) else 0,
            profiles=options.profiles,
            num_layers=built.num_layers,
            build_time_s=round(built.build_time_s, 2),
            peak_memory_mb=built.peak_memory_mb,
        )

    def _limits(self) -> Limits:
        spec = self.spec if isinstance(self.spec, GraphSpec) else self.manifest.target
        return Limits.of(self.manifest, spec, self.wanted.max_slots, self.wanted.chunk)

    def _options(self) -> PlanOptions:
        profiles = make_profiles(self.spec, self._limits())
        return PlanOptions(self.engine.gpus, profiles, self.engine.weight_streaming)

    def _form(self, graph: Path, limits: Limits) -> ir.Model:
        """The graph as TensorRT takes it; raises `EngineError` for what it would refuse."""
        model = ir.load(graph)
        TensorRTForm(limits.cache_length)(model)
        if self.engine.precision != "fp32":
            ComputeType(self.engine.precision)(model)
        if findings := lint(model):
            more = f" ({len(findings)} findings in all)" if len(findings) > 1 else ""
            raise EngineError(
                f"{self.engine.backend} cannot build {self.spec.path}: {findings[0]}{more}"
            )
        return model

    def _key(self, model: ir.Model, options: PlanOptions) -> str:
        """SHA-256 of all that the plan is made of."""
        values = model.graph.initializers.values()
        tensors = [v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)]
        folder = Path(self.spec.path).parent
        files = sorted({str(folder / str(tensor.location)) for tensor in tensors})
        parts = {
            "library": [self.library.backend, self.library.version],
            "options": asdict(options) | {"profiles": [p.model_dump() for p in options.profiles]},
            "weights": [self.manifest.files[file].sha256 for file in files],
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        digest.update(ir.to_proto(model).SerializeToString(deterministic=True))
        return digest.hexdigest()


def known_plans(bundle: Path) -> dict[str, tuple[Path, PlanSpec]]:
    """The plans of a bundle, by their keys; none where there is no bundle."""
    try:
        engines = read_manifest(bundle).engines
    except BundleError:
        return {}
    plans = [plan for engine in engines for plan in engine.plans.values()]
    return {plan.key: (bundle / plan.path, plan) for plan in plans}


def _link(source: Path, plan: PlanSpec, path: Path) -> bool:
    """Give a whole plan another name, which takes no room; False if it is damaged or gone."""
    if not source.is_file() or hash_file(source).sha256 != plan.sha256:
        return False
    try:
        os.link(source, path)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, path)
    return True
