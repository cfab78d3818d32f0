"""A library that is not there: TensorRT's runtime as far as plans call it, over ONNX Runtime.

A plan is the graph in the form that TensorRT gets, and its profiles; it runs on the CPU, with its
tensors in the memory of the fake GPU. What the contract asks for is asserted at every call.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from specexport.export.tensorrt.plan import Plan, PlanOptions
from tests.fake_cuda import FakeCuda

VERSION = "9.9"
ACTIVATIONS = 4096
"""Bytes that a context needs."""
_FOLDER, _PROFILES = "folder", "profiles"


def fake_build(
    library: Any, model: ir.Model, path: Path, options: PlanOptions, tell: Any = None
) -> Plan:
    """Takes the place of `build_plan`."""
    for node in model.graph:
        node.attributes.pop("TRT_decomposable", None)  # ONNX Runtime does not know it
    model.metadata_props[_FOLDER] = str(path.parent)
    profiles = [profile.model_dump()["sizes"] for profile in options.profiles]
    model.metadata_props[_PROFILES] = json.dumps(profiles)
    data = ir.to_proto(model).SerializeToString()
    return Plan(memoryview(data), len(model.graph), 0.0, 0)


class _Strategy(Enum):
    STATIC = 0
    USER_MANAGED = 2


class _GraphStrategy(Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class _Logger:
    INTERNAL_ERROR, ERROR = 0, 1

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


class FakeTensorRT:
    """Stands for the module `tensorrt_rtx`, or `tensorrt`."""

    ExecutionContextAllocationStrategy = _Strategy
    CudaGraphStrategy = _GraphStrategy
    ILogger = _Logger
    ComputeCapability = SimpleNamespace(SM89=89, SM120=120)
    __version__ = VERSION

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.engines: list[FakeEngine] = []
        self.refuses_to_run = False
        self.refuses_capture = False

    def Runtime(self, logger: _Logger) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self._load(logger, bytes(data)))

    def _load(self, logger: _Logger, data: bytes) -> Any:
        try:
            engine = FakeEngine(self, logger, onnx.load_from_string(data))
        except Exception as error:
            logger.log(_Logger.ERROR, f"not a plan: {error}")
            return None
        self.engines.append(engine)
        return engine


class FakeEngine:
    weight_streaming_budget_v2 = -1

    def __init__(self, library: FakeTensorRT, logger: _Logger, model: Any) -> None:
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        self.library, self.logger = library, logger
        self.profiles: list[Any] = json.loads(metadata[_PROFILES])
        self.num_optimization_profiles = len(self.profiles)
        self.device_memory_size_v2 = ACTIVATIONS
        self.contexts: list[_Context] = []
        self.aliases = {
            output.name: output.name.replace("present", "past_key_values")
            for output in model.graph.output
            if output.name.startswith("present.")
        }
        self._model, self._folder = model, metadata[_FOLDER]
        self.inputs = {value.name: _Tensor.of(value) for value in model.graph.input}
        self.outputs = {value.name: _Tensor.of(value) for value in model.graph.output}

    @cached_property
    def session(self) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # caches fed and fetched are copied, which it warns of
        entry = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(entry, self._folder)
        # Integer weights are multiplied out, as TensorRT reads them.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        data = self._model.SerializeToString()
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def get_weight_streaming_automatic_budget(self) -> int:
        return 12345

    def create_runtime_config(self) -> Any:
        return _Config()

    def create_execution_context(
        self, strategy: _Strategy | None = None, runtime_config: "_Config | None" = None
    ) -> "_Context":
        assert (strategy is None) != (runtime_config is None)
        if runtime_config is not None:
            assert runtime_config.cuda_graph_strategy is _GraphStrategy.WHOLE_GRAPH_CAPTURE
            strategy = runtime_config.strategy
        assert strategy is _Strategy.USER_MANAGED
        self.contexts.append(_Context(self))
        return self.contexts[-1]


class _Config:
    cuda_graph_strategy = _GraphStrategy.DISABLED
    strategy: _Strategy | None = None

    def set_execution_context_allocation_strategy(self, strategy: _Strategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        return True


@dataclass(frozen=True)
class _Tensor:
    dims: tuple[int | str, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, value: Any) -> "_Tensor":
        tensor = value.type.tensor_type
        dims = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        return cls(dims, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape)) * self.dtype.itemsize


@dataclass(eq=False)
class _Context:
    engine: FakeEngine
    profile: int | None = None
    has_memory: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    is_warm: bool = False
    num_runs: int = 0

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % 256 == 0
        assert size >= self.engine.device_memory_size_v2
        self.cuda.view("device", address, size)
        self.has_memory = True

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.cuda.stream(stream)
        self.profile = profile
        return 0 <= profile < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        dims, ranges = self.engine.inputs[name].dims, self.engine.profiles[self.profile]
        assert len(dims) == len(shape)
        for dim, size in zip(dims, shape, strict=True):
            least, most = (
                (dim, dim) if isinstance(dim, int) else (ranges[dim]["min"], ranges[dim]["max"])
            )
            assert least <= size <= most, f"{name} {shape} is outside profile {self.profile}"
        self.is_warm &= self.shapes.get(name) == shape
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.inputs.keys() | self.engine.outputs.keys()
        assert address % 256 == 0
        self.is_warm &= self.addresses.get(name) == address
        self.addresses[name] = address
        return True

    def execute_async_v3(self, handle: int) -> bool:
        stream = self.cuda.stream(handle)
        is_captured = stream.captured is not None
        library = self.engine.library
        if library.refuses_to_run or (is_captured and library.refuses_capture):
            self.engine.logger.log(_Logger.ERROR, "the fake was told to refuse")
            return False
        assert self.has_memory
        assert self.shapes.keys() == self.engine.inputs.keys()
        assert not is_captured or self.is_warm, "captured before it ran with these shapes"
        sizes = self._sizes()
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        shapes |= {name: tensor.shape(sizes) for name, tensor in self.engine.outputs.items()}
        for output, source in self.engine.aliases.items():
            assert addresses[output] == addresses[source], f"{output} is not written in place"
        for name in shapes:  # all of it is there already
            self._view(name, shapes, addresses)
        stream.put(lambda: self._run(shapes, addresses))
        self.is_warm = True
        return True

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        feeds = {name: self._view(name, shapes, addresses).copy() for name in self.engine.inputs}
        names = list(self.engine.outputs)
        found = self.engine.session.run(names, feeds)
        for name, value in zip(names, found, strict=True):
            self._view(name, shapes, addresses)[...] = value
        self.num_runs += 1

    def _view(self, name: str, shapes: Mapping[str, Any], addresses: Mapping[str, int]) -> Any:
        tensor = (self.engine.inputs | self.engine.outputs)[name]
        shape = shapes[name]
        raw = self.cuda.view("device", addresses[name], tensor.num_bytes(shape))
        return raw.view(tensor.dtype).reshape(shape)

    def _sizes(self) -> dict[str, int]:
        """By name; a name has one size wherever it stands."""
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            for dim, size in zip(self.engine.inputs[name].dims, shape, strict=True):
                if isinstance(dim, str):
                    assert sizes.setdefault(dim, size) == size, f"two sizes of {dim}"
        return sizes

    @property
    def cuda(self) -> FakeCuda:
        return self.engine.library.cuda
