"""Measure what the steps of a bundle's graphs cost on this machine."""

from pathlib import Path

from specexport.engines.available import EngineName
from specexport.engines.backend import open_backend
from specexport.engines.step import FunctionRunner, Profile
from specexport.export.manifest import FunctionSpec, GraphSpec, read_manifest, verify_files
from specexport.runtime.costs import StepCosts
from specexport.runtime.measuring import measure_costs, measure_function
from specexport.runtime.tuning import Tuning, write_tuning

_MAX_LENGTH = 1024
_MAX_QUERY = 128


def tune(bundle: Path, num_threads: int = 0, engine: EngineName = "onnxruntime") -> Tuning:
    """Measure every graph whose time counts in a step, and write `tuning.json`.

    `num_threads` and `engine` as in `EngineOptions`; raises `BundleError` for a damaged bundle,
    `ConfigError` where the engine cannot run here, and `OSError` where nothing can be written.
    """
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    backend = open_backend(engine, bundle, manifest, num_threads)
    costs = {}
    for name, spec in manifest.graphs.items():
        if isinstance(spec, GraphSpec):
            with backend.runner(name, _profile(spec)) as runner:
                costs[spec.path] = measure_costs(runner)
        elif isinstance(spec, FunctionSpec) and name == "medusa":
            costs[spec.path] = _function_costs(backend.function(name), spec)
    tuning = Tuning(machine=backend.machine, costs=costs)
    write_tuning(bundle, tuning)
    return tuning


def _profile(spec: GraphSpec) -> Profile:
    max_length = min(_MAX_LENGTH, spec.max_length)
    return Profile(max_slots=1, max_length=max_length, max_query=_MAX_QUERY)


def _function_costs(function: FunctionRunner, spec: FunctionSpec) -> StepCosts:
    costs = measure_function(function, spec.inputs[0].width)
    function.close()
    return costs
