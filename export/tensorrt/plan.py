"""A graph → a plan, through the library's own parser and builder.

Polygraphy's loaders do the same steps, but choose the library by an environment variable for the
whole process and leave its reasons in a log; here they are the error's text.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from specexport.errors import EngineError
from specexport.export.engine_spec import ShapeProfile, SizeRange
from specexport.export.tensorrt.library import Library
from specexport.export.tensorrt.timing_cache import Told, timing_cache
from specexport.nvidia_library import reasons


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is built for."""

    gpus: tuple[str, ...]
    profiles: tuple[ShapeProfile, ...]
    weight_streaming: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A serialized engine, and how its build went."""

    data: memoryview
    num_layers: int
    build_time_s: float
    peak_memory_mb: int


def build_plan(
    library: Library,
    model: ir.Model,
    path: Path,
    options: PlanOptions,
    tell: Told = lambda what: None,
) -> Plan:
    """Build `model`, the form of the graph at `path`, beside which its weights lie.

    Raises `EngineError` with the library's reasons.
    """
    started = time.perf_counter()
    name = f"{path.parent.name}/{path.name}"
    doing = f"{library.backend} {library.version} cannot build {name}"
    with reasons(library.module, doing) as logger:
        builder = library.module.Builder(logger)
        network = _parse(library, builder, model, path, logger)
        config = _config(library, builder, options)
        for profile in options.profiles:
            config.add_optimization_profile(_profile(builder, model, profile))
        with timing_cache(library, config, options.gpus[0], tell):
            data = builder.build_serialized_network(network, config)
        if data is None:
            raise EngineError("no plan was made")
    return Plan(
        memoryview(data),
        network.num_layers,
        time.perf_counter() - started,
        _peak_memory_mb(),
    )


def _parse(library: Library, builder: Any, model: ir.Model, path: Path, logger: Any) -> Any:  # noqa: ANN401 - the library has no types
    """The network. Nothing is saved: the parser is told where the weights lie."""
    typed = library.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    network = builder.create_network(1 << int(typed))  # types are the graph's
    parser = library.module.OnnxParser(network, logger)
    if not parser.parse(ir.to_proto(model).SerializeToString(), str(path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise EngineError("; ".join(f"{e.node_name()}: {e.desc()}" for e in errors))
    return network


def _config(library: Library, builder: Any, options: PlanOptions) -> Any:  # noqa: ANN401 - the library has no types
    config = builder.create_builder_config()
    if library.is_ahead_of_time:
        config.num_compute_capabilities = len(options.gpus)
        for i, gpu in enumerate(options.gpus):
            config.set_compute_capability(library.compute_capability(gpu), i)
    if options.weight_streaming:
        config.set_flag(library.module.BuilderFlag.WEIGHT_STREAMING)
    return config


def _profile(builder: Any, model: ir.Model, profile: ShapeProfile) -> Any:  # noqa: ANN401 - the library has no types
    """The shapes of all inputs that are not fixed."""
    made = builder.create_optimization_profile()
    for value in model.graph.inputs:
        dims = [
            dim if isinstance(dim, int) else profile.sizes[str(dim.value)]
            for dim in value.shape or ()
        ]
        if any(not isinstance(dim, int) for dim in dims):
            made.set_shape(value.name, *(_at(dims, end) for end in ("min", "opt", "max")))
    return made


def _at(dims: Sequence[int | SizeRange], end: Literal["min", "opt", "max"]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else getattr(dim, end) for dim in dims)


def _peak_memory_mb() -> int:
    """Main memory of this process at the most; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
