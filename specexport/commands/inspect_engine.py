"""What `specexport inspect` and `specexport build` show of engines built ahead of time."""

from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from specexport.engines.plan import DeviceMemory, build_command, problem
from specexport.export.engine_spec import EngineSpec
from specexport.export.manifest import Manifest


def engine_report(bundle: Path, manifest: Manifest, engine: EngineSpec) -> Group:
    """Its plans and how their builds went, and whether it fits this machine."""
    streaming = ", weights streamed" if engine.weight_streaming else ""
    title = (
        f"engine: {engine.backend} {engine.library_version} for {', '.join(engine.gpus)}, "
        f"computes in {engine.precision}{streaming}"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("plan of", "weights stored as"):
        table.add_column(heading)
    for heading in ("MB", "layers", "built in", "peak build memory", "cache length"):
        table.add_column(heading, justify="right")
    for name, plan in engine.plans.items():
        table.add_row(
            name,
            manifest.graphs[name].stored_as,
            f"{plan.size_bytes / 1e6:.1f}",
            str(plan.num_layers),
            f"{plan.build_time_s:.1f} s",
            f"{plan.peak_memory_mb} MB",
            str(plan.cache_length or "–"),
        )
    lines = [*_profiles(engine), _memory(manifest, engine), _state(bundle, engine)]
    return Group(table, *map(escape, lines))


def _profiles(engine: EngineSpec) -> list[str]:
    """Of the target: those of the others follow from the same limits."""
    return [str(profile) for profile in engine.plans["target"].profiles]


def _memory(manifest: Manifest, engine: EngineSpec) -> str:
    """What a GPU must have, as far as it is known before a plan is loaded."""
    memory = DeviceMemory.of(manifest, engine)
    slots = f"{memory.max_slots} request{'s' * (memory.max_slots > 1)}"
    streamed = ", which may be streamed" if engine.weight_streaming else ""
    return (
        f"GPU memory: about {memory.total_bytes / 1e9:.2f} GB (plans "
        f"{memory.plan_bytes / 1e9:.2f}{streamed}, caches of {slots} "
        f"{memory.cache_bytes / 1e9:.2f}), activations and logits on top; a smaller --max-slots "
        "or --max-length needs less"
    )


def _state(bundle: Path, engine: EngineSpec) -> str:
    reason = problem(bundle, engine)
    if reason is None:
        return (
            f"fits {engine.backend} as installed here; runs with --engine {engine.backend} on a "
            f"GPU of {' or '.join(engine.gpus)}"
        )
    return f"does not fit this machine: {reason}. Build it with: {build_command(bundle, engine)}"
