"""Choosing a plan before anything is deserialised: library, GPU, file, memory and shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specexport.errors import BundleError, ConfigError
from specexport.export.engine_spec import Backend, EngineSpec, FloatType, PlanSpec
from specexport.export.manifest import GraphSpec, Manifest, hash_file

_PACKAGES: dict[Backend, tuple[str, ...]] = {
    "tensorrt-rtx": ("tensorrt-rtx",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
}
_BYTES: dict[FloatType, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """About what an engine takes of a GPU's memory; activations and logits come on top."""

    plan_bytes: int
    """Weights, and kernels for all its GPUs; with weight streaming less may do."""
    cache_bytes: int
    max_slots: int

    @classmethod
    def of(cls, manifest: Manifest, engine: EngineSpec) -> "DeviceMemory":
        """All plans with the caches of all slots that they take."""
        sizes, caches = [], []
        for name, plan in engine.plans.items():
            sizes.append(plan.size_bytes)
            spec = manifest.graphs[name]
            if isinstance(spec, GraphSpec):
                caches.append(_cache_size(spec, plan) * _BYTES[engine.precision])
        return cls(sum(sizes), sum(caches), _max_slots(engine.plans["target"]))

    @property
    def total_bytes(self) -> int:
        """Of plans and caches."""
        return self.plan_bytes + self.cache_bytes


def _cache_size(spec: GraphSpec, plan: PlanSpec) -> int:
    """Numbers in the caches [L, kinds, slots, Hkv, S, D]."""
    entry = spec.num_layers * len(spec.cache_kinds) * spec.num_kv_heads * spec.head_dim
    return entry * _max_slots(plan) * plan.cache_length


def _max_slots(plan: PlanSpec) -> int:
    return max(profile.sizes["batch"].max for profile in plan.profiles)


def installed_version(backend: Backend) -> str | None:
    """Of the library, which is not loaded; None where it is not installed."""
    for package in _PACKAGES[backend]:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def find_engine(
    bundle: Path, manifest: Manifest, backend: Backend, library_version: str, gpu: str
) -> EngineSpec:
    """The engine for this library and GPU; raises `ConfigError` saying why there is none."""
    built = [engine for engine in manifest.engines if engine.backend == backend]
    reasons = []
    for engine in built:
        if (reason := mismatch(engine, library_version, gpu)) is None:
            return engine
        reasons.append(f"{engine.folder} {reason}")
    why = "; ".join(reasons) or f"the bundle has no {backend} engine"
    raise ConfigError(
        f"{bundle} cannot run on {gpu} with {backend} {library_version}: {why}. "
        f"Build one with: {_command(bundle, backend, [gpu])}"
    )


def mismatch(engine: EngineSpec, library_version: str | None, gpu: str | None) -> str | None:
    """Why the engine does not run with this library on this GPU; None where it does.

    Without a GPU the library alone is compared.
    """
    if library_version is None:
        return f"needs {engine.backend} {engine.library_version}, which is not installed here"
    if engine.library_version != library_version:
        return f"was built by version {engine.library_version}, and {library_version} is installed"
    if gpu is not None and gpu not in engine.gpus:
        return f"was built for {', '.join(engine.gpus)}, and the GPU is {gpu}"
    return None


def problem(bundle: Path, engine: EngineSpec, gpu: str | None = None) -> str | None:
    """Why the engine does not run on this machine, whose GPU is `gpu`; None where it does."""
    damages = (_damage(bundle / plan.path, plan) for plan in engine.plans.values())
    damage = next((found for found in damages if found is not None), None)
    return damage or mismatch(engine, installed_version(engine.backend), gpu)


def build_command(bundle: Path, engine: EngineSpec, gpu: str | None = None) -> str:
    """The command that builds an engine anew from the bundle alone, for its GPUs or another."""
    return _command(bundle, engine.backend, [gpu] if gpu else engine.gpus)


def check_plan(bundle: Path, engine: EngineSpec, plan: PlanSpec) -> None:
    """Raise `BundleError` unless the file is the plan that was built."""
    if damage := _damage(bundle / plan.path, plan):
        raise BundleError(f"{damage}. Build it again: {build_command(bundle, engine)}")


def _command(bundle: Path, backend: Backend, gpus: Sequence[str]) -> str:
    return f"specexport build {bundle} --engine {backend} --gpu {','.join(gpus)}"


def _damage(path: Path, plan: PlanSpec) -> str | None:
    """What became of a plan's file; None if it is whole."""
    if not path.is_file():
        return f"{path} is missing, though the manifest lists it"
    found = hash_file(path)
    if (found.size_bytes, found.sha256) != (plan.size_bytes, plan.sha256):
        return f"{path} was changed after the build: its size or SHA-256 differs from the manifest"
    return None


def choose_profile(plan: PlanSpec, sizes: Mapping[str, int]) -> int:
    """The index of the first profile that takes these sizes; raises `ConfigError` for none."""
    for index, profile in enumerate(plan.profiles):
        if profile.holds(sizes):
            return index
    came = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())
    raise ConfigError(
        f"{plan.path} takes no step with {came}. Its profiles are: "
        f"{'; '.join(map(str, plan.profiles))}. Build it with a larger --max-slots or "
        "--step-tokens, or load the bundle with less."
    )
