"""The ONNX Runtime engine: on the CPU provider, which is the default, or on those of a GPU."""

import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specexport.engines.available import EngineName, onnxruntime_version
from specexport.engines.cache import KvCache, cache_shape, too_large
from specexport.engines.ort_decide import OrtDecider
from specexport.engines.ort_session import Placement, open_session, place, usable_cpus
from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.errors import ConfigError, EngineError
from specexport.export.manifest import FunctionSpec, GraphSpec, Manifest
from specexport.gpu import find_gpu

_STATES = ("hidden_states", "recycled_states")  # a target's output, a head's
_MOST_BINDINGS = 64
"""Of ranges of slots, which are as many as pairs of slots; one takes some KB for each layer."""


class OrtRunner:
    """A graph on ONNX Runtime that owns its KV cache, in main memory or on the GPU.

    A cache tensor is bound as past input and present output at once, so TensorScatter writes in
    place. The rows of a step are neighbouring slots, which makes a batch a view of the cache: the
    bindings of each such range are made once, and the oldest are dropped when there are many.
    All else lies in main memory; with a GPU, ONNX Runtime copies what a step reads and gives.
    """

    def __init__(
        self,
        graph: Path,
        spec: GraphSpec,
        profile: Profile,
        placement: Placement = Placement(),
        decide: Path | None = None,
    ) -> None:
        """Load `graph`; raises `EngineError` if ONNX Runtime refuses it, `ConfigError` on sizes.

        `decide` is the graph that decides on its logits, on the CPU; None leaves that to the host.
        """
        if profile.max_length > spec.max_length:
            raise ConfigError(
                f"A cache of {profile.max_length} tokens was asked for, but {graph} was built for "
                f"{spec.max_length}. Lower --max-length, or build again with a larger one."
            )
        self.spec, self.profile = spec, profile
        self.run_time_s = 0.0
        threads, dequantize = profile.num_threads, _multiplies_out(spec) or profile.dequantize
        self._session = open_session(graph, placement, threads, dequantize=dequantize)
        self.can_decide = decide is not None
        self._decider = OrtDecider(open_session(decide, Placement(), threads)) if decide else None
        self._cache = _make_cache(spec, profile, placement)
        self._bindings: dict[tuple[int, int], Any] = {}  # by first slot and rows
        self._buffers: dict[str, NDArray[np.float32]] = {}
        self._states = next((o for o in spec.outputs if o.name in _STATES), None)
        self._logits = np.empty((0, spec.vocab_size), dtype=np.float32)

    def run(self, step: StepInput) -> StepOutput:
        """Run one step; raises `EngineError` with ONNX Runtime's reason if it fails."""
        if self._session is None:
            raise EngineError(f"The engine of {self.spec.path} is closed.")
        slots = step.first_slot, len(step.input_ids)
        binding = self._bindings.get(slots) or self._bind_cache(*slots)
        binding.bind_cpu_input("input_ids", step.input_ids)
        binding.bind_cpu_input("position_ids", step.position_ids)
        binding.bind_cpu_input("write_indices", step.write_indices)
        binding.bind_cpu_input("attention_mask", step.attention_mask)
        binding.bind_cpu_input("logits_indices", step.logits_indices)
        if step.hidden_states is not None:
            binding.bind_cpu_input("hidden_states", step.hidden_states)
        num_rows = len(step.logits_indices)
        self._logits = self._output(binding, "logits", num_rows, self.spec.vocab_size)
        hidden_states = self._bind_hidden_states(binding, step)
        started = time.perf_counter()
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(
                f"ONNX Runtime failed in a step of {self.spec.path}: {error}"
            ) from None
        decided = None
        if step.decide is not None and self._decider is not None:
            decided = self._decider.run(self._logits, step.decide)
        self.run_time_s += time.perf_counter() - started
        logits = self._logits if decided is None else self._logits[:0]
        return StepOutput(logits, hidden_states, decided)

    def read_logits(self) -> NDArray[np.float32]:
        """The logits [N, V] of the last step, valid until the next `run`."""
        return self._logits

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` cache entries of slot `source` over slot `destination`."""
        self._cache.move_slot(source, destination, length)

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move cache entries `start + entries[i]` of `slot` to `start + i`; `entries` ascend."""
        self._cache.compact(slot, start, entries)

    def read_cache(self, slot: int, start: int, stop: int) -> NDArray[np.float32]:
        """A copy of the entries [start, stop) of `slot`: [L, kinds, Hkv, stop - start, D]."""
        return self._cache.read(slot, start, stop)

    def write_cache(self, slot: int, start: int, entries: NDArray[np.float32]) -> None:
        """Put entries that `read_cache` gave into `slot`, the first at `start`."""
        self._cache.write(slot, start, entries)

    def close(self) -> None:
        """Free the session and the cache."""
        self._bindings.clear()
        self._session = self._decider = None
        self._cache.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _bind_cache(self, first: int, num_rows: int) -> Any:  # noqa: ANN401 - onnxruntime has no types
        binding, cache = self._session.io_binding(), self._cache
        shape = (num_rows, *cache.shape[3:])
        for layer in range(self.spec.num_layers):
            for index, kind in enumerate(self.spec.cache_kinds):
                address = cache.address(layer, index, first)
                where = cache.device, 0, np.float32, shape, address
                binding.bind_input(f"past_key_values.{layer}.{kind}", *where)
                binding.bind_output(f"present.{layer}.{kind}", *where)
        if len(self._bindings) == _MOST_BINDINGS:
            del self._bindings[next(iter(self._bindings))]
        self._bindings[first, num_rows] = binding
        return binding

    def _bind_hidden_states(self, binding: Any, step: StepInput) -> NDArray[np.float32] | None:  # noqa: ANN401 - onnxruntime has no types
        """A target's taps are [batch, query, W], a head's own state [num_logits, H]."""
        if self._states is None:
            return None
        *leading, width = self._states.shape
        num_rows = (len(step.logits_indices),) if len(leading) == 1 else step.input_ids.shape
        return self._output(binding, self._states.name, *num_rows, int(width))

    def _output(self, binding: Any, name: str, *shape: int) -> NDArray[np.float32]:  # noqa: ANN401 - onnxruntime has no types
        """An output in a buffer that is kept, and grows when it must."""
        size = int(np.prod(shape))
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, dtype=np.float32)
        array = self._buffers[name][:size].reshape(shape)
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        return array


class OrtFunction:
    """A graph without a cache on ONNX Runtime: one input, one output."""

    def __init__(
        self,
        graph: Path,
        num_threads: int = 0,
        placement: Placement = Placement(),
        *,
        dequantize: bool = False,
    ) -> None:
        """Load `graph`; raises `EngineError` if ONNX Runtime refuses it.

        `dequantize` is that of `Profile`.
        """
        self.run_time_s = 0.0
        self._session = open_session(graph, placement, num_threads, dequantize=dequantize)
        self._path = graph

    def run(self, hidden_states: NDArray[np.float32]) -> NDArray[np.float32]:
        """The output for `hidden_states`; raises `EngineError` with ONNX Runtime's reason."""
        started = time.perf_counter()
        try:
            (output,) = self._session.run(None, {"hidden_states": hidden_states})
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed in {self._path}: {error}") from None
        self.run_time_s += time.perf_counter() - started
        return output  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the session."""
        self._session = None


class OrtBackend:
    """The graphs of a bundle on ONNX Runtime."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        num_threads: int = 0,
        engine: EngineName = "onnxruntime",
    ) -> None:
        """`num_threads` 0: one for each usable CPU. Raises `ConfigError` where it cannot run."""
        self._bundle, self._graphs = bundle, manifest.graphs
        self._decide = bundle / manifest.decide.path if manifest.decide else None
        self._num_threads = num_threads or usable_cpus()
        self._placement = place(engine)
        self.machine = describe_machine(self._num_threads, engine)

    def runner(self, name: str, profile: Profile) -> OrtRunner:
        """Load a graph with a cache, on this engine's threads; raises as `OrtRunner` does."""
        spec = self._graphs[name]
        assert isinstance(spec, GraphSpec)
        profile = replace(profile, num_threads=self._num_threads)
        decide = self._decide if name == "target" and profile.decides else None
        return OrtRunner(self._bundle / spec.path, spec, profile, self._placement, decide)

    def function(self, name: str) -> OrtFunction:
        """Load a graph without a cache; raises as `OrtFunction` does."""
        spec = self._graphs[name]
        assert isinstance(spec, FunctionSpec)
        return OrtFunction(
            self._bundle / spec.path,
            self._num_threads,
            self._placement,
            dequantize=_multiplies_out(spec),
        )


def describe_machine(num_threads: int, engine: EngineName = "onnxruntime") -> str:
    """What the speed of steps depends on: processor, threads and engine."""
    processor = _processor_name() or platform.machine()
    if engine != "onnxruntime":
        return f"{find_gpu().name}, {processor}, {onnxruntime_version()}, {engine}"
    return f"{processor}, {num_threads} threads, onnxruntime {ort.__version__}"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def _multiplies_out(spec: GraphSpec | FunctionSpec) -> bool:
    """Once, on loading: codes of fp8 ONNX Runtime would multiply out anew in every step."""
    return "fp8" in spec.stored_types


def _make_cache(spec: GraphSpec, profile: Profile, placement: Placement) -> KvCache:
    shape = cache_shape(spec, profile)
    try:
        return placement.make_cache(shape)
    except (MemoryError, ValueError):
        raise too_large(shape) from None
