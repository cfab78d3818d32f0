"""Arrays that cross between host and GPU: pinned memory here, and memory of the GPU beside it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.cuda import CudaStream
from specexport.export.manifest import TensorSpec

Dims = Mapping[str, int]
"""Sizes of the dimensions that have names."""


def shape_of(tensor: TensorSpec, dims: Dims) -> tuple[int, ...]:
    """Its sizes in a step."""
    return tuple(dim if isinstance(dim, int) else dims[dim] for dim in tensor.shape)


def size_of(tensors: Sequence[TensorSpec], dims: Dims) -> int:
    """Bytes of them all."""
    return sum(math.prod(shape_of(t, dims)) * np.dtype(t.dtype).itemsize for t in tensors)


class Staging:
    """Room for tensors of up to certain sizes; a step uses the beginning of each."""

    def __init__(self, stream: CudaStream, tensors: Sequence[TensorSpec], dims: Dims) -> None:
        """`dims` are the largest sizes; raises `ConfigError` if there is no memory for them."""
        self._stream = stream
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._host: dict[str, NDArray[np.uint8]] = {}
        self.addresses: dict[str, int] = {}
        self._dims: dict[str, int] = {}
        self.reserve(dims)

    def reserve(self, dims: Dims) -> bool:
        """Make room for larger sizes; True if addresses changed. Nothing may be under way."""
        if all(size <= self._dims.get(name, 0) for name, size in dims.items()):
            return False
        larger = {name: _room(size, self._dims.get(name, 0)) for name, size in dims.items()}
        for name, tensor in self._tensors.items():
            size = size_of([tensor], larger)
            if name not in self._host or size > self._host[name].nbytes:
                if name in self.addresses:
                    self._stream.free(self.addresses.pop(name))
                self.addresses[name] = self._stream.allocate(size)
                self._host[name] = self._stream.allocate_host(size)
        self._dims = larger
        return True

    def shapes(self, names: Sequence[str], dims: Dims) -> dict[str, tuple[int, ...]]:
        """Of some tensors in a step."""
        return {name: shape_of(self._tensors[name], dims) for name in names}

    def upload(self, name: str, values: NDArray[Any], dims: Dims) -> None:
        """Put an array on its way; where it is smaller than its shape, the rest is 0."""
        host = self.view(name, dims)
        if host.shape != values.shape:
            host[...] = 0
        host[tuple(map(slice, values.shape))] = values
        self._stream.upload(self.addresses[name], host)

    def download(self, name: str, dims: Dims) -> NDArray[Any]:
        """An array that has its values once the stream was waited for, until the next download."""
        host = self.view(name, dims)
        if host.size:
            self._stream.download(host, self.addresses[name])
        return host

    def view(self, name: str, dims: Dims) -> NDArray[Any]:
        """The pinned array of a tensor."""
        tensor = self._tensors[name]
        return (
            self._host[name][: size_of([tensor], dims)]
            .view(tensor.dtype)
            .reshape(shape_of(tensor, dims))
        )


def _room(size: int, before: int) -> int:
    """As asked at first; what grows is doubled, so that it seldom grows."""
    if size <= before or not before:
        return max(size, before)
    return int(1 << (size - 1).bit_length())
