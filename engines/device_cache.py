"""A graph's KV cache in the GPU's memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.cuda import CudaStream, Planes
from specexport.engines.step import Floats
from specexport.engines.stored import STORED, from_stored, to_stored
from specexport.export.engine_spec import FloatType
from specexport.export.manifest import GraphSpec

_STAGED = 64
"""Entries of a slot that cross at once: two blocks of the prefix cache."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """[L * kinds, slots, Hkv, S, D] of one type; each of the first is bound as a tensor."""

    num_tensors: int
    num_slots: int
    num_heads: int
    length: int
    head_dim: int
    kind: FloatType

    @classmethod
    def of(cls, spec: GraphSpec, num_slots: int, length: int, kind: FloatType) -> "CacheShape":
        """Of a graph's caches; `length` is S."""
        num_tensors = spec.num_layers * len(spec.cache_kinds)
        return cls(num_tensors, num_slots, spec.num_kv_heads, length, spec.head_dim, kind)

    @property
    def entry_bytes(self) -> int:
        """Of one token in one head."""
        return self.head_dim * STORED[self.kind].itemsize

    @property
    def slot_bytes(self) -> int:
        """Of one slot in one tensor."""
        return self.num_heads * self.length * self.entry_bytes

    @property
    def staged_bytes(self) -> int:
        """Of the entries that cross at once."""
        return self.num_tensors * self.num_heads * _STAGED * self.entry_bytes

    @property
    def total_bytes(self) -> int:
        """Of all tensors, and of the entries on their way."""
        return self.num_tensors * self.num_slots * self.slot_bytes + self.staged_bytes


class DeviceCache:
    """Zeros at first. Copies within it are asynchronous, in the order of the stream's work."""

    def __init__(self, stream: CudaStream, shape: CacheShape) -> None:
        """Allocate it; raises `ConfigError` if it does not fit."""
        self._stream, self._shape = stream, shape
        self._start = stream.allocate(shape.total_bytes - shape.staged_bytes)
        self._staged = stream.allocate(shape.staged_bytes)
        self._host = stream.allocate_host(shape.staged_bytes).view(STORED[shape.kind])

    def address(self, tensor: int, first_slot: int) -> int:
        """Where the slots from `first_slot` on lie in a tensor, one after another."""
        return self._start + (tensor * self._shape.num_slots + first_slot) * self._shape.slot_bytes

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` entries of slot `source` over slot `destination`."""
        if source != destination and length:
            self._copy(self._entries(destination, 0), self._entries(source, 0), length)

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move entries `start + entries[i]` of `slot` to `start + i`; `entries` rise.

        By way of other memory: a copy may not overlap itself.
        """
        for first in range(0, len(entries), _STAGED):
            sources = [start + entry for entry in entries[first : first + _STAGED]]
            runs = _runs(sources)
            if runs == [(start + first, 0, len(sources))]:
                continue  # they are where they belong
            for source, done, length in runs:
                staged = self._between(self._staged, len(sources), done)
                self._copy(staged, self._entries(slot, source), length)
            staged = self._between(self._staged, len(sources))
            self._copy(self._entries(slot, start + first), staged, len(sources))

    def read(self, slot: int, start: int, stop: int) -> Floats:
        """A copy of the entries [start, stop): [L * kinds, Hkv, n, D]. Waits for the stream."""
        parts = [
            self._read(slot, first, min(_STAGED, stop - first))
            for first in range(start, stop, _STAGED)
        ]
        return np.concatenate(parts or [from_stored(self._host_view(0), self._shape.kind)], axis=2)

    def write(self, slot: int, start: int, entries: Floats) -> None:
        """Put entries [L * kinds, Hkv, n, D] into `slot`, the first at `start`; waits as well."""
        for first in range(0, entries.shape[2], _STAGED):
            part = to_stored(entries[:, :, first : first + _STAGED], self._shape.kind)
            host = self._host_view(part.shape[2])
            host[...] = part
            between = self._between(host.ctypes.data, part.shape[2])
            into = self._entries(slot, start + first)
            self._copy(into, between, part.shape[2], "HostToDevice")
            self._stream.synchronize()  # the next part takes its place

    def _read(self, slot: int, start: int, length: int) -> Floats:
        host = self._host_view(length)
        between = self._between(host.ctypes.data, length)
        self._copy(between, self._entries(slot, start), length, "DeviceToHost")
        self._stream.synchronize()
        return from_stored(host, self._shape.kind)

    def _host_view(self, length: int) -> NDArray[Any]:
        """[L * kinds, Hkv, length, D], pinned."""
        shape = self._shape
        sizes = (shape.num_tensors, shape.num_heads, length, shape.head_dim)
        return self._host[: math.prod(sizes)].reshape(sizes)

    def _entries(self, slot: int, start: int) -> Planes:
        """The entries of a slot from `start` on; a plane is a tensor, a row a head."""
        shape = self._shape
        address = self.address(0, slot) + start * shape.entry_bytes
        return Planes(address, shape.length * shape.entry_bytes, shape.num_slots * shape.num_heads)

    def _between(self, address: int, length: int, start: int = 0) -> Planes:
        """`length` entries of every head and tensor, packed, from `start` on."""
        size = self._shape.entry_bytes
        return Planes(address + start * size, length * size, self._shape.num_heads)

    def _copy(
        self, destination: Planes, source: Planes, length: int, kind: str = "DeviceToDevice"
    ) -> None:
        shape = self._shape
        extent = (length * shape.entry_bytes, shape.num_heads, shape.num_tensors)
        self._stream.copy_planes(destination, source, extent, kind)


def _runs(sources: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours in `sources`: the first, where it stands, and how many follow one another."""
    starts = [i for i, source in enumerate(sources) if i == 0 or source != sources[i - 1] + 1]
    return [(sources[i], i, end - i) for i, end in pairwise([*starts, len(sources)])]
