"""A plan that is deserialised, and the contexts that run it.

NVIDIA's contract for CUDA graphs: a context runs once after its shapes were set, is captured then,
and from then on its shapes stay as they are. So each context keeps the shapes and addresses of one
kind of step, and its graph; a kind that none has takes the one that was used longest ago. All share
the memory of activations, since they run one after another.
"""

import mmap
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specexport.engines.cuda import CudaStream
from specexport.engines.tensorrt.file import PlanFile
from specexport.errors import EngineError
from specexport.nvidia_library import reasons

NUM_CONTEXTS = 8
"""Of each profile: kinds of steps that stay bound."""

Bind = Callable[[Any], bool]
"""Gives a context its shapes and addresses; False where the library refuses one."""


@dataclass(eq=False, slots=True)
class _Bound:
    """A context, and the kind of step that it is bound for."""

    context: Any
    kind: Hashable = None
    is_warm: bool = False
    """It ran once with these shapes."""
    graph: Any = None


class LoadedPlan:
    """Contexts of each profile on one stream, made once. Not thread-safe."""

    def __init__(self, stream: CudaStream, file: PlanFile) -> None:
        """Deserialise; raises `EngineError` with the library's reasons."""
        self._stream, self._file = stream, file
        self._pools: list[list[_Bound]] = []
        # TensorRT-RTX captures graphs itself, once it has compiled the kernels of a shape.
        self._captures = file.engine.backend == "tensorrt"
        with reasons(file.module, f"{file.library} cannot load {file.path}") as logger:
            self._runtime = file.module.Runtime(logger)
            with (
                file.path.open("rb") as opened,
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                self._engine: Any = self._runtime.deserialize_cuda_engine(data)
            if self._engine is None:
                raise EngineError("no reason was given")

    def check_aliases(self, names: dict[str, str]) -> None:
        """Raise `EngineError` unless each output is written where its input lies."""
        for output, source in names.items():
            if self._engine.get_aliased_input_tensor(output) != source:
                raise EngineError(
                    f"{self._file.path} does not write {output} in place of {source}. Build it "
                    "again with this version of specexport."
                )

    def make_contexts(self) -> None:
        """After all other memory is allocated, since what is left decides what is streamed."""
        engine, stream = self._engine, self._stream
        if self._file.engine.weight_streaming:
            engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        size = int(engine.device_memory_size_v2)
        self._file.check_memory(stream.cuda.free_memory(), {"activations": size})
        memory, make = stream.allocate(size), self._maker()
        for profile in range(engine.num_optimization_profiles):
            contexts = [make() for _ in range(NUM_CONTEXTS)]
            for context in contexts:
                self._must(context is not None, "make a context")
                context.set_device_memory(memory, size)
                done = context.set_optimization_profile_async(profile, stream.handle)
                self._must(done, f"take profile {profile}")
            self._pools.append([_Bound(context) for context in contexts])
        stream.synchronize()

    def execute(self, profile: int, kind: Hashable, bind: Bind) -> None:
        """Put a step on the stream; `bind` is called unless a context is bound for the `kind`."""
        pool = self._pools[profile]  # the one that was used longest ago is the first
        bound = next((bound for bound in pool if bound.kind == kind), pool[0])
        pool.remove(bound)
        pool.append(bound)
        if bound.kind != kind:
            self._unbind(bound)
            with reasons(self._file.module, f"{self._file.library} refused a step of {self.name}"):
                self._must(bind(bound.context), "take its shapes")
            bound.kind = kind
        if bound.graph is None and bound.is_warm and self._captures:
            self._capture(bound)
        if bound.graph is not None:
            self._stream.launch(bound.graph)
        else:
            self._enqueue(bound.context)
            bound.is_warm = True

    @property
    def name(self) -> str:
        """Of the plan, for people."""
        return self._file.plan.path

    def unbind(self) -> None:
        """Forget what contexts are bound for: addresses have changed."""
        for pool in self._pools:
            for bound in pool:
                self._unbind(bound)

    def close(self) -> None:
        """Free graphs, contexts and engine, in that order."""
        with suppress(EngineError):  # after a failure, the driver frees them with the process
            self.unbind()
        self._pools.clear()
        self._engine = self._runtime = None

    def _capture(self, bound: _Bound) -> None:
        """Where it cannot be captured, steps are put on the stream call by call."""
        try:
            bound.graph = self._stream.capture(lambda: self._enqueue(bound.context))
        except EngineError:
            self._captures = False

    def _enqueue(self, context: Any) -> None:  # noqa: ANN401 - the library has no types
        with reasons(self._file.module, f"{self._file.library} failed in a step of {self.name}"):
            self._must(context.execute_async_v3(self._stream.handle), "run")

    def _unbind(self, bound: _Bound) -> None:
        graph, bound.graph = bound.graph, None
        bound.kind, bound.is_warm = None, False
        if graph is not None:
            self._stream.drop(graph)

    def _maker(self) -> Callable[[], Any]:
        """What makes contexts: they get the memory of activations from here."""
        trt, engine = self._file.module, self._engine
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._captures:
            return lambda: engine.create_execution_context(managed)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(managed)
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        config.set_runtime_cache(config.create_runtime_cache())  # one for all: compiled once
        return lambda: engine.create_execution_context(runtime_config=config)

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise EngineError(f"the library could not {what}")


def bind(
    context: Any,  # noqa: ANN401 - the library has no types
    shapes: Mapping[str, tuple[int, ...]],
    addresses: Mapping[str, int],
) -> bool:
    """Give a context the shapes of its inputs and all addresses; False if it refuses one."""
    return all(context.set_input_shape(name, shape) for name, shape in shapes.items()) and all(
        context.set_tensor_address(name, address) for name, address in addresses.items()
    )
