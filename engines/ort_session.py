"""ONNX Runtime's sessions: on the CPU, or on a GPU with proof that the GPU is what computes."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from specexport.engines.available import EngineName, check_available
from specexport.engines.cache import HostCache, KvCache, Shape
from specexport.engines.cuda_cache import CudaCache
from specexport.errors import EngineError
from specexport.files import user_cache

_CPU, _CUDA, _TENSORRT = (f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "Tensorrt"))
_CACHE_OPERATORS = ("TensorScatter", "Attention")
_NOT_FOR_TENSORRT = ("NonMaxSuppression", "NonZero", "RoiAlign", *_CACHE_OPERATORS)
"""The first three are the provider's own default. TensorRT would want caches of a fixed length that
are inputs and outputs of its own, and refuses attention in fp32; CUDA's kernels take both."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The providers of a session, the first first, and who makes its caches."""

    providers: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {_CPU: {}})
    """By name, with the options of each."""
    make_cache: Callable[[Shape], KvCache] = HostCache

    @property
    def is_gpu(self) -> bool:
        """Whether more than the CPU is wanted."""
        return set(self.providers) != {_CPU}


def place(engine: EngineName, plans: Path | None = None) -> Placement:
    """Where the engine of that name runs; raises `ConfigError` where it cannot.

    TensorRT's own engines are kept in `plans`; None: beside those of other bundles.
    """
    check_available(engine)
    if engine == "onnxruntime":
        return Placement()
    # TF32 keeps 11 bits of fp32's 24.
    providers: dict[str, Mapping[str, str]] = {_CUDA: {"use_tf32": "0"}, _CPU: {}}
    if engine == "onnxruntime-tensorrt":
        plans = plans or user_cache() / "onnxruntime-tensorrt"
        providers = {_TENSORRT: _tensorrt_options(plans), **providers}
    return Placement(providers, CudaCache)


def _tensorrt_options(plans: Path) -> dict[str, str]:
    plans.mkdir(parents=True, exist_ok=True)
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(plans),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(plans),
        "trt_op_types_to_exclude": ",".join(_NOT_FOR_TENSORRT),
    }


def open_session(
    graph: Path, placement: Placement, num_threads: int, *, dequantize: bool = False
) -> Any:  # noqa: ANN401 - onnxruntime has no types
    """Load `graph`; raises `EngineError` if ONNX Runtime refuses it, or does not use the GPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads or usable_cpus()
    # Shapes change at every step: a remembered memory plan per shape would only pile up.
    options.enable_mem_pattern = False
    if dequantize:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if placement.is_gpu:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    providers = [(name, dict(chosen)) for name, chosen in placement.providers.items()]
    try:
        session = ort.InferenceSession(str(graph), options, providers=providers)
    except Exception as error:
        raise EngineError(f"ONNX Runtime {ort.__version__} cannot load {graph}: {error}") from None
    if placement.is_gpu:
        _check_providers(session, graph, next(iter(placement.providers)))
    return session


def _check_providers(session: Any, graph: Path, wanted: str) -> None:  # noqa: ANN401
    """ONNX Runtime goes on silently without a provider, and without kernels that one lacks."""
    if wanted not in session.get_providers():
        raise EngineError(
            f"ONNX Runtime {ort.__version__} did not use {wanted} for {graph}, but only "
            f"{', '.join(session.get_providers())}; its own messages say why. specexport doctor "
            "shows what is missing."
        )
    nodes = placed_nodes(session)
    if not nodes.get(wanted):
        raise EngineError(
            f"{wanted} took no node of {graph}, so it would gain nothing. Use onnxruntime-cuda."
        )
    on_cpu = nodes.get(_CPU, Counter())
    if stranded := [name for name in _CACHE_OPERATORS if on_cpu[name]]:
        raise EngineError(
            f"ONNX Runtime {ort.__version__} runs {' and '.join(stranded)} of {graph} on the CPU: "
            "every step would copy whole caches. Install a newer onnxruntime-gpu."
        )


def placed_nodes(session: Any) -> dict[str, Counter[str]]:  # noqa: ANN401 - onnxruntime has no types
    """By provider, how many nodes of each operator it was given."""
    placed: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        names = (node.op_type for node in part.get_nodes())
        placed.setdefault(part.ep_name, Counter()).update(names)
    return placed


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
