"""The ONNX Runtime engine on the CPU provider: the default, on any machine."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.errors import ConfigError, EngineError
from specexport.export.manifest import GraphSpec, Manifest

_STATES = ("hidden_states", "recycled_states")  # a target's output, a head's
_MOST_BINDINGS = 64
"""Of ranges of slots, which are as many as pairs of slots; one takes some KB for each layer."""


class OrtRunner:
    """A graph on ONNX Runtime with its KV cache in one NumPy array [L, kinds, slots, Hkv, S, D].

    The kinds are key and value, or key alone where one tensor serves as both (latent attention).
    A cache tensor is bound as past input and present output at once, so TensorScatter writes in
    place. The rows of a step are neighbouring slots, which makes a batch a view of the cache: the
    bindings of each such range are made once, and the oldest are dropped when there are many.
    """

    def __init__(self, graph: Path, spec: GraphSpec, profile: Profile) -> None:
        """Load `graph`; raises `EngineError` if ONNX Runtime refuses it, `ConfigError` on sizes."""
        if profile.max_length > spec.max_length:
            raise ConfigError(
                f"A cache of {profile.max_length} tokens was asked for, but {graph} was built for "
                f"{spec.max_length}. Lower --max-length, or build again with a larger one."
            )
        self.spec, self.profile = spec, profile
        self.run_time_s = 0.0
        self.can_decide = False
        dequantize = profile.dequantize or "fp8" in spec.stored_types
        self._session = _open_session(graph, profile.num_threads, dequantize=dequantize)
        # Drafts end past the text, and rows that are shorter than the longest in padding.
        length = profile.max_length + profile.max_nodes + profile.max_query
        self._cache = _allocate_cache(spec, profile, length)
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
        self.run_time_s += time.perf_counter() - started
        return StepOutput(self._logits, hidden_states)

    def read_logits(self) -> NDArray[np.float32]:
        """The logits [N, V] of the last step, valid until the next `run`."""
        return self._logits

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` cache entries of slot `source` over slot `destination`."""
        self._cache[:, :, destination, :, :length] = self._cache[:, :, source, :, :length]

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move cache entries `start + entries[i]` of `slot` to `start + i`."""
        sources = start + np.asarray(entries)
        cache = self._cache[:, :, slot]
        cache[..., start : start + len(entries), :] = cache[..., sources, :]

    def read_cache(self, slot: int, start: int, stop: int) -> NDArray[np.float32]:
        """A copy of the entries [start, stop) of `slot`: [L, kinds, Hkv, stop - start, D]."""
        return self._cache[:, :, slot, :, start:stop].copy()

    def write_cache(self, slot: int, start: int, entries: NDArray[np.float32]) -> None:
        """Put entries that `read_cache` gave into `slot`, the first at `start`."""
        self._cache[:, :, slot, :, start : start + entries.shape[3]] = entries

    def close(self) -> None:
        """Free the session and the cache."""
        self._bindings.clear()
        self._session = None
        self._cache = np.empty(0, dtype=np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _bind_cache(self, first: int, num_rows: int) -> Any:  # noqa: ANN401 - onnxruntime has no types
        binding = self._session.io_binding()
        for layer in range(self.spec.num_layers):
            for index, kind in enumerate(self.spec.cache_kinds):
                view = self._cache[layer, index, first : first + num_rows]
                value = ort.OrtValue.ortvalue_from_numpy(view)  # shares the memory
                binding.bind_ortvalue_input(f"past_key_values.{layer}.{kind}", value)
                binding.bind_ortvalue_output(f"present.{layer}.{kind}", value)
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

    def __init__(self, graph: Path, num_threads: int = 0, *, dequantize: bool = False) -> None:
        """Load `graph`; raises `EngineError` if ONNX Runtime refuses it.

        `dequantize` is that of `Profile`.
        """
        self.run_time_s = 0.0
        self._session = _open_session(graph, num_threads, dequantize=dequantize)
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
    """The graphs of a bundle on the CPU provider."""

    def __init__(self, bundle: Path, manifest: Manifest, num_threads: int = 0) -> None:
        """`num_threads` 0: one for each usable CPU."""
        self._bundle, self._graphs = bundle, manifest.graphs
        self._num_threads = num_threads or usable_cpus()
        self.machine = describe_machine(self._num_threads)

    def runner(self, name: str, profile: Profile) -> OrtRunner:
        """Load a graph with a cache, on this engine's threads; raises as `OrtRunner` does."""
        spec = self._graphs[name]
        assert isinstance(spec, GraphSpec)
        profile = replace(profile, num_threads=self._num_threads)
        return OrtRunner(self._bundle / spec.path, spec, profile)

    def function(self, name: str) -> OrtFunction:
        """Load a graph without a cache; raises as `OrtFunction` does."""
        spec = self._graphs[name]
        dequantize = "fp8" in spec.stored_types
        return OrtFunction(self._bundle / spec.path, self._num_threads, dequantize=dequantize)


def describe_machine(num_threads: int) -> str:
    """What the speed of steps depends on: processor, threads and engine."""
    processor = _processor_name() or platform.machine()
    return f"{processor}, {num_threads} threads, onnxruntime {ort.__version__}"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open_session(graph: Path, num_threads: int, *, dequantize: bool = False) -> Any:  # noqa: ANN401 - onnxruntime has no types
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads or usable_cpus()
    # Shapes change at every step: a remembered memory plan per shape would only pile up.
    options.enable_mem_pattern = False
    if dequantize:  # once, on loading: codes of fp8 it would multiply out anew in every step
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EngineError(f"ONNX Runtime {ort.__version__} cannot load {graph}: {error}") from None


def _allocate_cache(spec: GraphSpec, profile: Profile, length: int) -> NDArray[np.float32]:
    sizes = (profile.max_slots, spec.num_kv_heads, length, spec.head_dim)
    shape = (spec.num_layers, len(spec.cache_kinds), *sizes)
    try:
        # Zeros, not garbage: a NaN past the valid length would poison the attention's output.
        # The pages cost memory only once they are written.
        return np.zeros(shape, dtype=np.float32)
    except (MemoryError, ValueError):  # more than there is, or than can be addressed
        size_gb = np.prod(shape, dtype=np.float64) * 4 / 1e9
        raise ConfigError(
            f"A KV cache of {profile.max_slots} slots x {length} tokens needs {size_gb:.1f} GB. "
            "Lower --max-slots or --max-length."
        ) from None
