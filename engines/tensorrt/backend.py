"""The plans of a bundle on the GPU of this machine."""

from pathlib import Path

from specexport.engines.available import check_available
from specexport.engines.cuda import Cuda
from specexport.engines.plan import check_plan, find_engine
from specexport.engines.step import Profile
from specexport.engines.tensorrt.file import PlanFile
from specexport.engines.tensorrt.function import TensorRTFunction
from specexport.engines.tensorrt.runner import DecidePlan, TensorRTRunner
from specexport.export.engine_spec import Backend
from specexport.export.manifest import FunctionSpec, GraphSpec, Manifest
from specexport.gpu import find_gpu
from specexport.nvidia_library import import_library


class TensorRTBackend:
    """The engine of a bundle that fits this library and this GPU."""

    def __init__(self, bundle: Path, manifest: Manifest, backend: Backend) -> None:
        """Raises `ConfigError` where the library, the GPU or an engine for both is missing."""
        check_available(backend)
        gpu = find_gpu()
        self._module = import_library(backend)
        self._cuda = Cuda()
        version = str(self._module.__version__)
        self._engine = find_engine(bundle, manifest, backend, version, gpu.compute_capability)
        self._bundle, self._graphs = bundle, manifest.graphs
        self.machine = f"{gpu.name}, {backend} {version}, {self._engine.precision}"

    def runner(self, name: str, profile: Profile) -> TensorRTRunner:
        """Load the plan of a graph with a cache; raises as `TensorRTRunner` does."""
        spec = self._graphs[name]
        assert isinstance(spec, GraphSpec)
        decides = name == "target" and profile.decides is not False
        decide = self._decide() if decides else None
        return TensorRTRunner(self._cuda, self._file(name), spec, profile, decide)

    def function(self, name: str) -> TensorRTFunction:
        """Load the plan of a graph without a cache; raises as `TensorRTFunction` does."""
        spec = self._graphs[name]
        assert isinstance(spec, FunctionSpec)
        return TensorRTFunction(self._cuda, self._file(name), spec)

    def _decide(self) -> DecidePlan | None:
        """None where the engine was built without one."""
        spec = self._graphs.get("decide")
        if spec is None or "decide" not in self._engine.plans:
            return None
        return DecidePlan(self._file("decide"), (*spec.inputs, *spec.outputs))

    def _file(self, name: str) -> PlanFile:
        """The plan, whole."""
        plan = self._engine.plans[name]
        check_plan(self._bundle, self._engine, plan)
        return PlanFile(self._module, self._bundle, self._engine, plan)
