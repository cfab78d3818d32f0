"""A GPU that is not there: CUDA's runtime as far as plans call it, over main memory.

Work on a stream is done when somebody waits for it, not before, so an array that is read or written
too early shows. Every address is checked: whose memory it is, how far it reaches, that it was not
freed, and that the host's side of a copy is pinned. A call that breaks the contract is an
AssertionError, which no code of the product catches.
"""

from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GARBAGE = 0xFF  # NaN in every float type


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalAddress = 700


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


_OK = cudaError_t.cudaSuccess
_SIDES = {1: ("host", "device"), 2: ("device", "host"), 3: ("device", "device")}
Work = Callable[[], None]


class _Stream:
    def __init__(self) -> None:
        self.pending: list[Work] = []
        self.captured: list[Work] | None = None

    def put(self, work: Work) -> None:
        (self.pending if self.captured is None else self.captured).append(work)


class FakeCuda:
    """Stands for the module `cuda.bindings.runtime`."""

    cudaMemcpyKind = cudaMemcpyKind
    cudaStreamCaptureMode = cudaStreamCaptureMode
    cudaStreamNonBlocking = 1
    cudaHostAllocDefault = 0

    def __init__(self, memory_bytes: int = 2**30) -> None:
        self.memory_bytes = memory_bytes
        self.calls: list[str] = []
        self.fail: dict[str, cudaError_t] = {}
        """What calls of a name answer from now on, instead of doing anything."""
        self.streams: dict[int, _Stream] = {}
        self.graphs: dict[int, list[Work]] = {}
        self._handles = iter(range(1, 10**9))
        self._memory: dict[str, dict[int, NDArray[np.uint8]]] = {"device": {}, "host": {}}
        self._graveyard: list[Any] = []  # freed memory is never given out again

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("cuda") or not callable(value) or isinstance(value, type):
            return value
        self.calls.append(name)
        if name in self.fail:
            return lambda *arguments: (self.fail[name], None)
        return value

    @property
    def used_bytes(self) -> int:
        return sum(block.nbytes for block in self._memory["device"].values())

    def num_blocks(self, side: str) -> int:
        return len(self._memory[side])

    def stream(self, handle: Any) -> _Stream:
        assert int(handle) in self.streams, "the stream was destroyed, or is the default one"
        return self.streams[int(handle)]

    def view(self, side: str, address: int, size: int) -> NDArray[np.uint8]:
        """Memory of one allocation."""
        for start, block in self._memory[side].items():
            if start <= address < start + block.nbytes:
                assert address + size <= start + block.nbytes, f"{side} memory is too small"
                return block[address - start : address - start + size]
        raise AssertionError(f"{address:#x} is no {side} memory, or was freed")

    # The functions of CUDA

    def cudaGetErrorName(self, error: cudaError_t) -> Any:
        return _OK, error.name.encode()

    def cudaGetErrorString(self, error: cudaError_t) -> Any:
        return _OK, b"as the fake was told"

    def cudaMemGetInfo(self) -> Any:
        return _OK, self.memory_bytes - self.used_bytes, self.memory_bytes

    def cudaMalloc(self, size: int) -> Any:
        if self.used_bytes + size > self.memory_bytes:
            return cudaError_t.cudaErrorMemoryAllocation, None
        return _OK, self._allocate("device", size)

    def cudaFree(self, address: int) -> Any:
        self._free("device", address)
        return (_OK,)

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        return _OK, self._allocate("host", size)

    def cudaFreeHost(self, address: int) -> Any:
        self._free("host", address)
        return (_OK,)

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        assert flags == self.cudaStreamNonBlocking
        handle = next(self._handles)
        self.streams[handle] = _Stream()
        return _OK, handle

    def cudaStreamDestroy(self, handle: int) -> Any:
        del self.streams[handle]
        return (_OK,)

    def cudaStreamSynchronize(self, handle: int) -> Any:
        stream = self.stream(handle)
        assert stream.captured is None, "waited while capturing"
        pending, stream.pending = stream.pending, []
        for work in pending:
            work()
        return (_OK,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, handle: int) -> Any:
        self.stream(handle).put(lambda: self.view("device", address, size).fill(value))
        return (_OK,)

    def cudaMemcpyAsync(
        self, destination: int, source: int, size: int, kind: int, handle: int
    ) -> Any:
        sides = _SIDES[kind]

        def copy() -> None:
            self.view(sides[1], destination, size)[:] = self.view(sides[0], source, size)

        self.view(sides[1], destination, size)
        self.view(sides[0], source, size)
        self.stream(handle).put(copy)
        return (_OK,)

    def cudaMemcpy3DParms(self) -> Any:
        return SimpleNamespace()

    def make_cudaPitchedPtr(self, address: int, pitch: int, width: int, height: int) -> Any:
        return SimpleNamespace(ptr=address, pitch=pitch, ysize=height)

    def make_cudaExtent(self, width: int, height: int, depth: int) -> Any:
        return width, height, depth

    def cudaMemcpy3DAsync(self, parameters: Any, handle: int) -> Any:
        sides, (width, height, depth) = _SIDES[parameters.kind], parameters.extent
        ends = tuple(
            [
                [p.ptr + (plane * p.ysize + row) * p.pitch for row in range(height)]
                for plane in range(depth)
            ]
            for p in (parameters.srcPtr, parameters.dstPtr)
        )
        for p in (parameters.srcPtr, parameters.dstPtr):
            assert width <= p.pitch
            assert height <= p.ysize
        if sides[0] == sides[1]:
            _assert_apart(ends, width)

        def copy() -> None:
            for sources, destinations in zip(*ends, strict=True):
                for source, destination in zip(sources, destinations, strict=True):
                    taken = self.view(sides[0], source, width)
                    self.view(sides[1], destination, width)[:] = taken

        self.stream(handle).put(copy)
        return (_OK,)

    def cudaStreamBeginCapture(self, handle: int, mode: int) -> Any:
        stream = self.stream(handle)
        assert stream.captured is None
        stream.captured = []
        return (_OK,)

    def cudaStreamEndCapture(self, handle: int) -> Any:
        stream = self.stream(handle)
        work, stream.captured = stream.captured, None
        assert work is not None
        return _OK, work

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> Any:
        handle = next(self._handles)
        self.graphs[handle] = list(graph)
        return _OK, handle

    def cudaGraphDestroy(self, graph: list[Work]) -> Any:
        graph.clear()
        return (_OK,)

    def cudaGraphLaunch(self, graph: int, handle: int) -> Any:
        work = self.graphs[graph]
        self.stream(handle).pending.extend(work)
        return (_OK,)

    def cudaGraphExecDestroy(self, graph: int) -> Any:
        work = self.graphs.pop(graph)
        for stream in self.streams.values():
            assert not any(done in stream.pending for done in work), "dropped while in use"
        return (_OK,)

    def _allocate(self, side: str, size: int) -> int:
        """Aligned as CUDA's, and full of garbage."""
        assert size > 0
        room = np.full(size + 512, _GARBAGE, dtype=np.uint8)
        skipped = -room.ctypes.data % 512
        block = room[skipped : skipped + size]
        address = int(block.ctypes.data)
        self._memory[side][address] = block
        return address

    def _free(self, side: str, address: int) -> None:
        block = self._memory[side].pop(address)
        block.fill(_GARBAGE)
        self._graveyard.append(block)


def _assert_apart(ends: tuple[list[list[int]], ...], width: int) -> None:
    """No row of the source overlaps one of the destination."""
    rows = sorted((row, side) for side, end in enumerate(ends) for plane in end for row in plane)
    for (row, side), (following, other) in pairwise(rows):
        assert side == other or row + width <= following, "a copy overlaps itself"
