"""The KV cache of a graph in main memory: one array [L, kinds, slots, Hkv, S, D]."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import Profile
from specexport.errors import ConfigError
from specexport.export.manifest import GraphSpec

Shape = tuple[int, int, int, int, int, int]
"""L, kinds, slots, Hkv, S, D. The kinds are key and value, or key alone (latent attention)."""


class KvCache(Protocol):
    """The cache tensors of all layers, zero-filled at first.

    Zeros, not garbage: a NaN past the valid length would poison the attention's output. Slots are
    neighbours in each layer's tensor, so the rows of a step are an address and a shape.
    """

    device: str
    """As ONNX Runtime calls it: cpu or cuda."""
    shape: Shape

    def address(self, layer: int, kind: int, slot: int) -> int:
        """Where the entries of a slot begin."""
        ...

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy cache entries to another slot; this and the next three are those of `StepRunner`."""
        ...

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move cache entries of a slot together."""
        ...

    def read(self, slot: int, start: int, stop: int) -> NDArray[np.float32]:
        """A copy of cache entries."""
        ...

    def write(self, slot: int, start: int, entries: NDArray[np.float32]) -> None:
        """Put cache entries back."""
        ...

    def free(self) -> None:
        """Give the memory back."""
        ...


class HostCache:
    """In main memory. The pages cost memory only once they are written."""

    device = "cpu"

    def __init__(self, shape: Shape) -> None:
        """Raises `MemoryError` or `ValueError`: more than there is, or than can be addressed."""
        self.shape = shape
        self.array: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)

    def address(self, layer: int, kind: int, slot: int) -> int:
        """Where the entries of a slot begin."""
        return int(self.array[layer, kind, slot].ctypes.data)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` entries of slot `source` over slot `destination`."""
        self.array[:, :, destination, :, :length] = self.array[:, :, source, :, :length]

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move entries `start + entries[i]` of `slot` to `start + i`."""
        sources = start + np.asarray(entries, dtype=np.int64)
        cache = self.array[:, :, slot]
        cache[..., start : start + len(entries), :] = cache[..., sources, :]

    def read(self, slot: int, start: int, stop: int) -> NDArray[np.float32]:
        """A copy of the entries [start, stop) of `slot`: [L, kinds, Hkv, stop - start, D]."""
        return self.array[:, :, slot, :, start:stop].copy()

    def write(self, slot: int, start: int, entries: NDArray[np.float32]) -> None:
        """Put entries that `read` gave into `slot`, the first at `start`."""
        self.array[:, :, slot, :, start : start + entries.shape[3]] = entries

    def free(self) -> None:
        """Give the memory back."""
        self.array = np.empty(0, dtype=np.float32)


def cache_shape(spec: GraphSpec, profile: Profile) -> Shape:
    """Drafts end past the text, and rows that are shorter than the longest in padding."""
    length = profile.max_length + profile.max_nodes + profile.max_query
    sizes = (profile.max_slots, spec.num_kv_heads, length, spec.head_dim)
    return (spec.num_layers, len(spec.cache_kinds), *sizes)


def too_large(shape: Shape) -> ConfigError:
    """The error for a cache that does not fit."""
    size_gb = np.prod(shape, dtype=np.float64) * 4 / 1e9
    return ConfigError(
        f"A KV cache of {shape[2]} slots x {shape[4]} tokens needs {size_gb:.1f} GB. "
        "Lower --max-slots or --max-length."
    )
