"""The KV cache of an ONNX Runtime session in the GPU's memory: fp32, as the graphs' types are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specexport.engines.cache import Shape
from specexport.engines.cuda import Cuda, CudaStream
from specexport.engines.device_cache import CacheShape, DeviceCache


class CudaCache:
    """A cache on a stream of its own.

    ONNX Runtime's streams know nothing of that one, so all is done on return; and a session's step
    is over when its `run` returns.
    """

    device = "cuda"

    def __init__(self, shape: Shape) -> None:
        """Raises `ConfigError` where it does not fit or CUDA cannot be used."""
        layers, kinds, slots, heads, length, width = shape
        sizes = CacheShape(layers * kinds, slots, heads, length, width, "fp32")
        self.shape = shape
        self._stream = CudaStream(Cuda())
        try:
            self._cache = DeviceCache(self._stream, sizes)
            self._stream.synchronize()
        except BaseException:
            self.free()
            raise

    def address(self, layer: int, kind: int, slot: int) -> int:
        """Where the entries of a slot begin."""
        return self._cache.address(layer * self.shape[1] + kind, slot)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` entries of slot `source` over slot `destination`."""
        self._cache.move(source, destination, length)
        self._stream.synchronize()

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move entries `start + entries[i]` of `slot` to `start + i`; `entries` ascend."""
        self._cache.compact(slot, start, entries)
        self._stream.synchronize()

    def read(self, slot: int, start: int, stop: int) -> NDArray[np.float32]:
        """A copy of the entries [start, stop) of `slot`: [L, kinds, Hkv, stop - start, D]."""
        entries = self._cache.read(slot, start, stop)
        return entries.reshape(*self.shape[:2], *entries.shape[1:])

    def write(self, slot: int, start: int, entries: NDArray[np.float32]) -> None:
        """Put entries that `read` gave into `slot`, the first at `start`."""
        num_tensors = self.shape[0] * self.shape[1]
        self._cache.write(slot, start, entries.reshape(num_tensors, *entries.shape[2:]))

    def free(self) -> None:
        """Give the memory back."""
        self._stream.close()
