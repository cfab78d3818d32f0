"""A plan of a graph without a cache."""

import time

import numpy as np

from specexport.engines.cuda import Cuda, CudaStream
from specexport.engines.plan import choose_profile
from specexport.engines.step import Floats
from specexport.engines.tensorrt.file import PlanFile
from specexport.engines.tensorrt.loaded import LoadedPlan, bind
from specexport.engines.tensorrt.staging import Staging, size_of
from specexport.errors import EngineError
from specexport.export.manifest import FunctionSpec


class TensorRTFunction:
    """A plan of a graph without a cache: one input, one output, each row for itself."""

    def __init__(self, cuda: Cuda, file: PlanFile, spec: FunctionSpec) -> None:
        """Load it; raises as `TensorRTRunner` does."""
        self.run_time_s = 0.0
        self._plan, self._path = file.plan, spec.path
        (source,), (result,) = spec.inputs, spec.outputs
        self._source, self._result, self._rows = source.name, result.name, str(source.shape[0])
        self._most = file.largest(self._rows)
        tensors, dims = (source, result), {self._rows: self._most}
        needs = {"plan": file.weight_bytes, "buffers": size_of(tensors, dims)}
        file.check_memory(cuda.free_memory(), needs)
        self._stream = CudaStream(cuda)
        with self._stream.closed_on_error():
            self._loaded = LoadedPlan(self._stream, file)
            self._staging = Staging(self._stream, tensors, dims)
            self._loaded.make_contexts()

    def run(self, hidden_states: Floats) -> Floats:
        """The output for `hidden_states`; more rows than the plan takes run one part after another.

        Raises `EngineError` with the reason of TensorRT or CUDA.
        """
        if not self._stream.is_open:
            raise EngineError(f"The engine of {self._path} is closed.")
        started = time.perf_counter()
        starts = range(0, len(hidden_states), self._most)
        parts = [self._run(hidden_states[start : start + self._most]) for start in starts]
        self.run_time_s += time.perf_counter() - started
        return np.concatenate(parts)

    def close(self) -> None:
        """Free the plan and the stream."""
        self._loaded.close()
        self._stream.close()

    def _run(self, rows: Floats) -> Floats:
        dims = {self._rows: len(rows)}
        self._staging.upload(self._source, rows, dims)
        shapes = self._staging.shapes([self._source], dims)
        self._loaded.execute(
            choose_profile(self._plan, dims),
            len(rows),
            lambda context: bind(context, shapes, self._staging.addresses),
        )
        output = self._staging.download(self._result, dims)
        self._stream.synchronize()
        return output.copy()
