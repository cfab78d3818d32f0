"""The options of `specexport build` that make engines besides the graphs."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, get_args

import click

from specexport.errors import ConfigError
from specexport.export.engine_spec import Backend, FloatType
from specexport.export.manifest import WEIGHT_TYPES, WeightType
from specexport.export.precision import has_codes
from specexport.export.tensorrt.wanted import WantedEngine

F = TypeVar("F", bound=Callable[..., Any])

ENGINE_OPTIONS = (
    "engine",
    "gpus",
    "precision",
    "max_slots",
    "step_tokens",
    "weight_streaming",
)


PRECISION = click.option(
    "--precision",
    type=click.Choice(get_args(FloatType)),
    help="What a plan computes in  [default: as the matrices are stored; fp16 with int8, int4 or "
    "fp8].",
)
GPU = click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="SM,…",
    callback=lambda context, parameter, values: gpu_names(values),
    help="Compute capabilities that plans are built for, such as sm89,sm120.",
)


def gpu_names(values: Iterable[str]) -> tuple[str, ...]:
    """SM89,sm120 → sm89 and sm120."""
    return tuple(name.strip().lower() for names in values for name in names.split(","))


def engine_build_options(function: F) -> F:
    """Add the options; what they say is `engines`, and `weight_type` for --precision int8."""
    for option in (
        click.option(
            "--weight-streaming",
            is_flag=True,
            help="Plans may keep weights in main memory and stream them.",
        ),
        click.option(
            "--step-tokens",
            type=click.IntRange(1),
            default=256,
            show_default=True,
            help="Most prompt tokens of a request in one step of a plan.",
        ),
        click.option(
            "--max-slots",
            type=click.IntRange(1),
            default=8,
            show_default=True,
            help="Most requests in one step of a plan.",
        ),
        click.option(
            "--precision",
            type=click.Choice(WEIGHT_TYPES),
            help="int8, int4, fp8: matrices are stored so (--weights), and plans compute in fp16. "
            "fp32, fp16, bf16: what plans compute in  [default: as the matrices are stored].",
        ),
        GPU,
        click.option(
            "--engine",
            multiple=True,
            type=click.Choice(["onnxruntime", *get_args(Backend)]),
            help="Build plans of all graphs too; onnxruntime runs the graphs as they are and needs "
            "none  [default: onnxruntime].",
        ),
    ):
        function = option(function)
    return _as_engines(function)


def _as_engines(function: F) -> F:
    @wraps(function)
    def command(**values: Any) -> Any:  # noqa: ANN401 - whatever the command returns
        chosen = {name: values.pop(name) for name in ENGINE_OPTIONS}
        precision = chosen["precision"]
        if precision is not None and has_codes(precision):
            values["weight_type"] = _stored(precision, values["weight_type"])
            chosen["precision"] = None
        return function(engines=_wanted(**chosen), **values)

    return command  # type: ignore[return-value]


def _stored(precision: WeightType, weights: WeightType | None) -> WeightType:
    """How matrices are stored; raises `ConfigError` where --weights says something else."""
    if weights not in (None, precision):
        raise ConfigError(
            f"--precision {precision} stores matrices as {precision}, and --weights {weights} as "
            f"{weights}. Leave one of them out; with --weights, --precision fp32, fp16 or bf16 is "
            "what plans compute in."
        )
    return precision


def _wanted(
    engine: tuple[str, ...],
    gpus: tuple[str, ...],
    precision: FloatType | None,
    max_slots: int,
    step_tokens: int,
    weight_streaming: bool,
) -> tuple[WantedEngine, ...]:
    backends = [name for name in dict.fromkeys(engine) if name in get_args(Backend)]
    if not backends:
        if precision is not None:
            raise ConfigError(
                f"--precision {precision} is what a plan of TensorRT computes in; a CPU computes "
                f"in fp32. Give --engine tensorrt-rtx as well, or --weights {precision} to store "
                "the matrices so."
            )
        _refuse({"--gpu": gpus, "--weight-streaming": weight_streaming})
    return tuple(
        WantedEngine(name, gpus, precision, max_slots, step_tokens, weight_streaming)  # type: ignore[arg-type]
        for name in backends
    )


def _refuse(given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{option} is for plans of TensorRT. Give --engine tensorrt-rtx as well, or leave "
                "it out."
            )
