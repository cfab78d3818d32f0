"""The few calls of the CUDA runtime that plans need; an error says what to do about it."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from specexport.errors import ConfigError, EngineError

Bytes = NDArray[np.uint8]

_REMEDIES = {
    "cudaErrorInsufficientDriver": "There is no NVIDIA driver, or it is older than the installed "
    "cuda-bindings need. Install a newer driver, or the cuda-bindings of its version",
    "cudaErrorNoDevice": "The driver shows no GPU. Is CUDA_VISIBLE_DEVICES empty?",
    "cudaErrorMemoryAllocation": "The GPU's memory is full. Lower --max-slots, or stop what else "
    "uses the GPU (nvidia-smi shows it)",
}
_NO_USE = "The process cannot use the GPU any more; start it again"


class Cuda:
    """The CUDA runtime; raises `EngineError` for any call that fails."""

    def __init__(self) -> None:
        """Raises `ConfigError` where the package is missing."""
        try:
            self.api: Any = import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise ConfigError(
                f"Plans run through the package cuda-bindings, which cannot be imported ({error}). "
                "Install it with: pip install 'specexport[rtx]', or 'specexport[gpu]' for plain "
                "TensorRT"
            ) from None

    def call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - addresses and handles
        """What the function of that name gives; None for nothing."""
        status, *values = getattr(self.api, name)(*arguments)
        if int(status):
            self._refuse(name, status)
        return values[0] if len(values) == 1 else tuple(values) or None

    def free_memory(self) -> int:
        """Bytes of the GPU's memory that are free."""
        free, _ = self.call("cudaMemGetInfo")
        return int(free)

    def _refuse(self, name: str, status: Any) -> None:  # noqa: ANN401 - cuda-bindings' enum
        error, text = (
            getattr(self.api, function)(status)[1].decode()
            for function in ("cudaGetErrorName", "cudaGetErrorString")
        )
        kind = ConfigError if error in _REMEDIES else EngineError
        raise kind(f"{name} failed with {error} ({text}). {_REMEDIES.get(error, _NO_USE)}.")


@dataclass(frozen=True, slots=True)
class Planes:
    """Where planes of rows lie: `num_rows` to a plane, `pitch_bytes` from one to the next."""

    address: int
    pitch_bytes: int
    num_rows: int


class CudaStream:
    """One stream, and memory that is used on it alone. All but `synchronize` returns at once."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        flags = cuda.api.cudaStreamNonBlocking
        self.handle = int(cuda.call("cudaStreamCreateWithFlags", flags))
        self._blocks: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Until `close`."""
        return self.handle != 0

    def allocate(self, size_bytes: int) -> int:
        """The address of zeros on the GPU: of garbage, a NaN might poison what is masked."""
        address = int(self.cuda.call("cudaMalloc", max(size_bytes, 1)))
        self._blocks.add(address)
        self.cuda.call("cudaMemsetAsync", address, 0, size_bytes, self.handle)
        return address

    def free(self, address: int) -> None:
        """Give memory on the GPU back; nothing that uses it may be under way."""
        self._blocks.remove(address)
        self.cuda.call("cudaFree", address)

    def allocate_host(self, size_bytes: int) -> Bytes:
        """Pinned memory, which copies need to be asynchronous; freed with its last view."""
        flags = self.cuda.api.cudaHostAllocDefault
        address = int(self.cuda.call("cudaHostAlloc", max(size_bytes, 1), flags))
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        finalize(memory, self.cuda.api.cudaFreeHost, address).atexit = False
        return np.ctypeslib.as_array(memory)

    def upload(self, address: int, host: NDArray[Any]) -> None:
        """Copy contiguous pinned memory to the GPU; it must stay as it is until `synchronize`."""
        self._copy(address, host.ctypes.data, host.nbytes, "HostToDevice")

    def download(self, host: NDArray[Any], address: int) -> None:
        """Copy to contiguous pinned memory; it may be read after `synchronize`."""
        self._copy(host.ctypes.data, address, host.nbytes, "DeviceToHost")

    def copy_planes(
        self, destination: Planes, source: Planes, extent: tuple[int, int, int], kind: str
    ) -> None:
        """Copy `extent`: bytes of a row, rows of a plane, planes. The two may not overlap.

        `kind` is DeviceToDevice, HostToDevice or DeviceToHost, all to pinned memory.
        """
        api, (width, height, depth) = self.cuda.api, extent
        parameters = api.cudaMemcpy3DParms()
        parameters.dstPtr = self._pitched(destination)
        parameters.srcPtr = self._pitched(source)
        parameters.extent = api.make_cudaExtent(width, height, depth)
        parameters.kind = getattr(api.cudaMemcpyKind, f"cudaMemcpy{kind}")
        self.cuda.call("cudaMemcpy3DAsync", parameters, self.handle)

    def synchronize(self) -> None:
        """Wait for all that was asked for."""
        self.cuda.call("cudaStreamSynchronize", self.handle)

    def capture(self, work: Callable[[], None]) -> Any:  # noqa: ANN401 - a handle
        """A graph of what `work` puts on the stream, which is not done now."""
        mode = self.cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.cuda.call("cudaStreamBeginCapture", self.handle, mode)
        try:
            work()
        except EngineError:
            self.cuda.api.cudaStreamEndCapture(self.handle)  # the stream is usable again
            raise
        graph = self.cuda.call("cudaStreamEndCapture", self.handle)
        try:
            return self.cuda.call("cudaGraphInstantiate", graph, 0)
        finally:
            self.cuda.call("cudaGraphDestroy", graph)

    def launch(self, graph: Any) -> None:  # noqa: ANN401 - a handle
        """Do what was captured."""
        self.cuda.call("cudaGraphLaunch", graph, self.handle)

    def drop(self, graph: Any) -> None:  # noqa: ANN401 - a handle
        """Free a graph, which may not be under way."""
        self.cuda.call("cudaGraphExecDestroy", graph)

    def close(self) -> None:
        """Free the stream and its memory; a second call does nothing."""
        blocks, self._blocks, handle, self.handle = self._blocks, set(), self.handle, 0
        for address in blocks:
            self.cuda.api.cudaFree(address)  # whatever went wrong before, the rest is freed
        if handle:
            self.cuda.api.cudaStreamDestroy(handle)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Free all where loading fails half-way."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _copy(self, destination: int, source: int, size_bytes: int, kind: str) -> None:
        direction = getattr(self.cuda.api.cudaMemcpyKind, f"cudaMemcpy{kind}")
        arguments = (destination, source, size_bytes, direction, self.handle)
        self.cuda.call("cudaMemcpyAsync", *arguments)

    def _pitched(self, planes: Planes) -> Any:  # noqa: ANN401 - a structure
        sizes = planes.pitch_bytes, planes.pitch_bytes, planes.num_rows
        return self.cuda.api.make_cudaPitchedPtr(planes.address, *sizes)
