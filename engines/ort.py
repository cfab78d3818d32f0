"""The ONNX Runtime engine on the CPU provider: the default, on any machine."""

import os
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.errors import ConfigError, EngineError
from specexport.export.manifest import GraphSpec


class OrtRunner:
    """A graph on ONNX Runtime with its KV cache in one NumPy array [L, kinds, slots, Hkv, S, D].

    The kinds are key and value, or key alone where one tensor serves as both (latent attention).
    A cache tensor is bound as past input and present output at once, so TensorScatter writes in
    place. Row b of a step is slot b, which makes a batch of B rows a prefix view of the cache:
    the bindings of each B are made once.
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
        self._session = _open_session(graph, profile)
        # Rows that have fewer tokens than the longest write padding past their end.
        self._cache = _allocate_cache(spec, profile, profile.max_length + profile.max_query)
        self._bindings: dict[int, Any] = {}
        self._logits = np.empty((0, spec.vocab_size), dtype=np.float32)

    def run(self, step: StepInput) -> StepOutput:
        """Run one step; raises `EngineError` with ONNX Runtime's reason if it fails."""
        if self._session is None:
            raise EngineError(f"The engine of {self.spec.path} is closed.")
        num_rows = step.input_ids.shape[0]
        binding = self._bindings.get(num_rows) or self._bind_cache(num_rows)
        binding.bind_cpu_input("input_ids", step.input_ids)
        binding.bind_cpu_input("position_ids", step.position_ids)
        binding.bind_cpu_input("write_indices", step.write_indices)
        binding.bind_cpu_input("attention_mask", step.attention_mask)
        binding.bind_cpu_input("logits_indices", step.logits_indices)
        logits = self._logits_buffer(len(step.logits_indices))
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        started = time.perf_counter()
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(
                f"ONNX Runtime failed in a step of {self.spec.path}: {error}"
            ) from None
        self.run_time_s += time.perf_counter() - started
        return StepOutput(logits)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` cache entries of slot `source` over slot `destination`."""
        self._cache[:, :, destination, :, :length] = self._cache[:, :, source, :, :length]

    def close(self) -> None:
        """Free the session and the cache."""
        self._bindings.clear()
        self._session = None
        self._cache = np.empty(0, dtype=np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _bind_cache(self, num_rows: int) -> Any:  # noqa: ANN401 - onnxruntime has no types
        binding = self._session.io_binding()
        for layer in range(self.spec.num_layers):
            for index, kind in enumerate(self.spec.cache_kinds):
                view = self._cache[layer, index, :num_rows]
                value = ort.OrtValue.ortvalue_from_numpy(view)  # shares the memory
                binding.bind_ortvalue_input(f"past_key_values.{layer}.{kind}", value)
                binding.bind_ortvalue_output(f"present.{layer}.{kind}", value)
        self._bindings[num_rows] = binding
        return binding

    def _logits_buffer(self, num_logits: int) -> NDArray[np.float32]:
        if len(self._logits) < num_logits:
            self._logits = np.empty((num_logits, self.spec.vocab_size), dtype=np.float32)
        return self._logits[:num_logits]


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open_session(graph: Path, profile: Profile) -> Any:  # noqa: ANN401 - onnxruntime has no types
    options = ort.SessionOptions()
    options.intra_op_num_threads = profile.num_threads or usable_cpus()
    # Shapes change at every step: a remembered memory plan per shape would only pile up.
    options.enable_mem_pattern = False
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
