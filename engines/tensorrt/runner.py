"""One step of a plan: inputs up, the plan, outputs down, and one wait for all of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from specexport.engines.cuda import Cuda, CudaStream
from specexport.engines.device_cache import CacheShape, DeviceCache
from specexport.engines.plan import choose_profile
from specexport.engines.step import DecideOutput, Floats, Profile, StepInput, StepOutput
from specexport.engines.tensorrt.decider import Decider
from specexport.engines.tensorrt.file import PlanFile
from specexport.engines.tensorrt.loaded import LoadedPlan, bind
from specexport.engines.tensorrt.staging import Dims, Staging, size_of
from specexport.errors import EngineError
from specexport.export.manifest import GraphSpec, TensorSpec

_LENGTH_STEP = 64
"""Masks are padded to whole steps, so that neighbouring lengths are one shape with one graph."""


@dataclass(frozen=True, slots=True)
class DecidePlan:
    """The plan of a target's decide graph, and the graph's inputs and outputs."""

    file: PlanFile
    tensors: tuple[TensorSpec, ...]

    @property
    def buffer_bytes(self) -> int:
        """Of its usual inputs and outputs but the logits, which are the target's."""
        usual = {name: size.opt for name, size in self.file.plan.profiles[0].sizes.items()}
        return size_of([tensor for tensor in self.tensors if tensor.name != "logits"], usual)


class TensorRTRunner:
    """A plan with its KV cache in the GPU's memory, in the plan's precision.

    A batch is bound as the part of each cache that begins with its first slot, as input and output
    at once. Buffers are allocated on loading. One exception: a step that wants logits of more rows
    than drafts have (log-probabilities of a prompt) makes room for them first.
    """

    def __init__(
        self,
        cuda: Cuda,
        file: PlanFile,
        spec: GraphSpec,
        profile: Profile,
        decide: DecidePlan | None = None,
    ) -> None:
        """Load it; raises `ConfigError` where it does not fit, `EngineError` for the library's.

        `decide` is the plan that decides on its logits; None leaves that to the host.
        """
        file.check(spec, profile)
        self.spec, self.profile = spec, profile
        self.run_time_s = 0.0
        self.can_decide = decide is not None
        self._last: Dims = {"num_logits": 0}
        self._plan = file.plan
        plain = [t for t in (*spec.inputs, *spec.outputs) if not _is_cache(t)]
        self._inputs = [t.name for t in spec.inputs if not _is_cache(t)]
        self._states = [t.name for t in spec.outputs if t.name != "logits" and not _is_cache(t)]
        self._caches = [t.name for t in spec.inputs if _is_cache(t)]
        shape = CacheShape.of(
            spec, profile.max_slots, file.plan.cache_length, file.engine.precision
        )
        file.check_alignment(shape.slot_bytes)
        dims = _largest(profile, file.plan.cache_length)
        weights = file.weight_bytes + (decide.file.weight_bytes if decide else 0)
        buffers = size_of(plain, dims) + (decide.buffer_bytes if decide else 0)
        needs = {"plan": weights, "caches": shape.total_bytes, "buffers": buffers}
        file.check_memory(cuda.free_memory(), needs)
        self._stream = CudaStream(cuda)
        with self._stream.closed_on_error():
            self._loaded = LoadedPlan(self._stream, file)
            self._loaded.check_aliases({_present(name): name for name in self._caches})
            self._cache = DeviceCache(self._stream, shape)
            self._staging = Staging(self._stream, plain, dims)
            self._decider = Decider(self._stream, decide.file, decide.tensors) if decide else None
            self._loaded.make_contexts()
            if self._decider:
                self._decider.make_contexts()

    def run(self, step: StepInput) -> StepOutput:
        """Run one step; raises `EngineError` with the reason of TensorRT or CUDA if it fails."""
        self._check_open()
        started = time.perf_counter()
        dims = self._dims(step)
        profile = choose_profile(self._plan, dims)
        if self._staging.reserve(dims):
            self._loaded.unbind()
        for name in self._inputs:
            self._staging.upload(name, getattr(step, name), dims)
        kind = (*dims.values(), step.first_slot)
        self._loaded.execute(
            profile, kind, lambda context: self._bind(context, dims, step.first_slot)
        )
        self._last = dims
        decided = self._decide(step)
        wanted = {**dims, "num_logits": 0} if decided else dims
        logits = self._staging.download("logits", wanted)
        states = [self._staging.download(name, dims) for name in self._states]
        self._stream.synchronize()
        self.run_time_s += time.perf_counter() - started
        return StepOutput(logits, states[0] if states else None, decided)

    def read_logits(self) -> Floats:
        """The logits [N, V] of the last step, valid until the next `run`."""
        self._check_open()
        logits = self._staging.download("logits", self._last)
        self._stream.synchronize()
        return logits

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` cache entries of slot `source` over slot `destination`."""
        self._check_open()
        self._cache.move(source, destination, length)

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move cache entries `start + entries[i]` of `slot` to `start + i`."""
        self._check_open()
        self._cache.compact(slot, start, entries)

    def read_cache(self, slot: int, start: int, stop: int) -> Floats:
        """A copy of the entries [start, stop) of `slot`: [L, kinds, Hkv, stop - start, D]."""
        self._check_open()
        entries = self._cache.read(slot, start, stop)
        kinds = (self.spec.num_layers, len(self.spec.cache_kinds))
        return entries.reshape(*kinds, *entries.shape[1:])

    def write_cache(self, slot: int, start: int, entries: Floats) -> None:
        """Put entries that `read_cache` gave into `slot`, rounded to the cache's precision."""
        self._check_open()
        self._cache.write(slot, start, entries.reshape(-1, *entries.shape[2:]))

    def close(self) -> None:
        """Free the plans, the cache and the stream."""
        if self._decider:
            self._decider.close()
        self._loaded.close()
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _decide(self, step: StepInput) -> DecideOutput | None:
        """What will have been decided; None where the host has to."""
        if step.decide is None or self._decider is None or not self._decider.takes(step.decide):
            return None
        return self._decider.enqueue(step.decide, self._staging.addresses["logits"])

    def _dims(self, step: StepInput) -> Dims:
        num_rows, width = step.input_ids.shape
        length = -(-step.attention_mask.shape[-1] // _LENGTH_STEP) * _LENGTH_STEP
        length = min(length, self._plan.cache_length)
        return {
            "batch": num_rows,
            "query": width,
            "valid_length": length,
            "num_logits": len(step.logits_indices),
        }

    def _bind(self, context: Any, dims: Dims, first_slot: int) -> bool:  # noqa: ANN401 - the library has no types
        sizes = {**dims, "cache_length": self._plan.cache_length}
        cache = (sizes["batch"], self.spec.num_kv_heads, sizes["cache_length"], self.spec.head_dim)
        shapes = self._staging.shapes(self._inputs, dims) | dict.fromkeys(self._caches, cache)
        addresses = dict(self._staging.addresses)
        for tensor, name in enumerate(self._caches):
            address = self._cache.address(tensor, first_slot)
            addresses |= {name: address, _present(name): address}
        return bind(context, shapes, addresses)

    def _check_open(self) -> None:
        if not self._stream.is_open:
            raise EngineError(f"The engine of {self.spec.path} is closed.")


def _is_cache(tensor: TensorSpec) -> bool:
    return tensor.name.startswith(("past_key_values.", "present."))


def _present(name: str) -> str:
    """The output that an input cache is written to."""
    return name.replace("past_key_values.", "present.", 1)


def _largest(profile: Profile, cache_length: int) -> Dims:
    """The largest sizes of usual steps: all drafts of all requests have logits."""
    return {
        "batch": profile.max_slots,
        "query": profile.max_query,
        "valid_length": cache_length,
        "num_logits": profile.max_slots * (profile.max_nodes + 1),
    }
