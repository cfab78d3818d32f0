"""How caches are stored: fp32, fp16 or bf16, for which NumPy has no type of its own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import Floats
from specexport.export.engine_spec import FloatType

STORED: dict[FloatType, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # the upper half of an fp32
}


def from_stored(values: NDArray[Any], kind: FloatType) -> Floats:
    """A copy in fp32, exact."""
    if kind != "bf16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def to_stored(values: Floats, kind: FloatType) -> NDArray[Any]:
    """The nearest values of that type, ties to even."""
    if kind != "bf16":
        return values.astype(STORED[kind], copy=False)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
