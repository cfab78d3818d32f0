"""The engines that a bundle can run on, by name; each opens the bundle's graphs."""

from pathlib import Path
from typing import Protocol

from specexport.engines.available import EngineName
from specexport.engines.ort import OrtBackend
from specexport.engines.step import FunctionRunner, Profile, StepRunner
from specexport.export.manifest import Manifest


class Backend(Protocol):
    """Opens the graphs of one bundle by their names in the manifest: target, draft and so on."""

    machine: str
    """What the speed of its steps depends on: processor, library and version."""

    def runner(self, name: str, profile: Profile) -> StepRunner:
        """Load a graph with a cache; raises `EngineError` or `ConfigError` with the remedy."""
        ...

    def function(self, name: str) -> FunctionRunner:
        """Load a graph without a cache; raises as `runner` does."""
        ...


def open_backend(
    engine: EngineName, bundle: Path, manifest: Manifest, num_threads: int = 0
) -> Backend:
    """The engine of that name; raises `ConfigError` where it cannot run here.

    `num_threads` is for graphs that run on the CPU; 0 takes one for each usable CPU.
    """
    if engine in ("tensorrt", "tensorrt-rtx"):
        from specexport.engines.tensorrt.backend import TensorRTBackend

        return TensorRTBackend(bundle, manifest, engine)
    return OrtBackend(bundle, manifest, num_threads, engine)
