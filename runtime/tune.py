"""Measure what the steps of a bundle's graphs cost on this machine."""

from pathlib import Path

from specexport.engines.ort import OrtFunction, OrtRunner, usable_cpus
from specexport.engines.step import Profile
from specexport.export.manifest import GraphSpec, Manifest, read_manifest, verify_files
from specexport.runtime.measuring import measure_costs, measure_function
from specexport.runtime.tuning import Tuning, describe_machine, write_tuning

_MAX_LENGTH = 1024
_MAX_QUERY = 128


def tune(bundle: Path, num_threads: int = 0) -> Tuning:
    """Measure every graph whose time counts in a step, and write `tuning.json`.

    `num_threads` as in `EngineOptions`; raises `BundleError` for a damaged bundle and `OSError`
    where it cannot be written to.
    """
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    costs = {}
    for spec in _step_graphs(manifest):
        profile = Profile(
            max_slots=1,
            max_length=min(_MAX_LENGTH, spec.max_length),
            max_query=_MAX_QUERY,
            num_threads=num_threads,
        )
        with OrtRunner(bundle / spec.path, spec, profile) as runner:
            costs[spec.path] = measure_costs(runner)
    if manifest.head and (heads := manifest.head.medusa):
        function = OrtFunction(bundle / heads.path, num_threads)
        costs[heads.path] = measure_function(function, heads.inputs[0].width)
        function.close()
    tuning = Tuning(machine=describe_machine(num_threads or usable_cpus()), costs=costs)
    write_tuning(bundle, tuning)
    return tuning


def _step_graphs(manifest: Manifest) -> list[GraphSpec]:
    head = manifest.head.step if manifest.head else None
    return [spec for spec in (manifest.target, manifest.draft, head) if spec is not None]
