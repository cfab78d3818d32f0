"""The tensors of a GGUF file, read and dequantized by the `gguf` package."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Tensor

_PLAIN_TYPES: dict[gguf.GGMLQuantizationType, tuple[str, Any]] = {
    gguf.GGMLQuantizationType.F32: ("fp32", np.float32),
    gguf.GGMLQuantizationType.F16: ("fp16", np.float16),
    gguf.GGMLQuantizationType.BF16: ("bf16", ml_dtypes.bfloat16),
}
_CHUNK_ELEMENTS = 1 << 22
_TWIN_SAMPLE_ROWS = 256


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in the mapped file."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """Rows first, unlike in the file."""
    rows: NDArray[Any]  # [rows, bytes or values of a row]

    @property
    def dtype(self) -> str:
        """Type that `read` returns: the file's own, fp32 for quantized tensors."""
        return _PLAIN_TYPES.get(self.kind, ("fp32", None))[0]

    @property
    def bits_per_weight(self) -> float:
        """Size of the type."""
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return 8.0 * float(block_bytes) / float(block_elements)

    def read(self) -> Tensor:
        """All of the tensor, dequantized in chunks so that memory stays near its own size."""
        if self.kind in _PLAIN_TYPES:
            plain: Tensor = self.rows.view(_PLAIN_TYPES[self.kind][1])
            return plain.reshape(self.shape)
        tensor = np.empty((len(self.rows), self.shape[-1]), np.float32)
        step = max(1, _CHUNK_ELEMENTS // self.shape[-1])
        with np.errstate(all="ignore"):  # who reads the checkpoint looks for NaN and infinity
            for first in range(0, len(tensor), step):
                chunk = slice(first, first + step)
                tensor[chunk] = gguf.dequantize(self.rows[chunk], self.kind)
        return tensor.reshape(self.shape)

    def sample(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Some rows of a matrix.  # [indices, columns]."""
        return np.asarray(gguf.dequantize(self.rows[indices], self.kind), np.float64)


def open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors by name; raises `CheckpointError` if the file is cut off or damaged."""
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the package raises whatever the damage leads to
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is cut off or damaged: "
            f"{type(error).__name__}: {error}. Download it again."
        ) from None
    size_bytes = path.stat().st_size
    needed_bytes = max((int(t.data_offset + t.n_bytes) for t in reader.tensors), default=0)
    if size_bytes < needed_bytes:
        raise CheckpointError(
            f"{path} is cut off: it has {size_bytes} bytes, its tensors need {needed_bytes}. "
            "Download it again."
        )
    return metadata, {t.name: _stored(t, path) for t in reader.tensors}


def are_twins(first: StoredTensor, second: StoredTensor) -> bool:
    """True when two matrices are one up to their quantization, by a sample of rows.

    The rounding of a good 4.5-bit type leaves a cosine of about 0.996; each bit more quarters the
    distance to 1. Different matrices lie far below.
    """
    if first.shape != second.shape or len(first.shape) != 2:
        return False
    indices = np.linspace(0, first.shape[0] - 1, _TWIN_SAMPLE_ROWS).astype(np.int64)
    a, b = first.sample(indices), second.sample(indices)
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    bits = min(first.bits_per_weight, second.bits_per_weight, 8.5)
    tolerance = 0.01 * 4 ** (4.5 - bits)
    return norm > 0 and 1 - float((a * b).sum()) / norm <= tolerance


def _stored(tensor: Any, path: Path) -> StoredTensor:  # noqa: ANN401 - gguf has no types
    """Raises `CheckpointError` for a type that gguf cannot dequantize."""
    kind = tensor.tensor_type
    if kind not in _PLAIN_TYPES:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} is of type {kind.name}, which the installed gguf "
                "package cannot dequantize. Update it, or give another quantization."
            ) from None
    shape = tuple(int(size) for size in reversed(tensor.shape))
    rows = np.asarray(tensor.data).reshape(int(np.prod(shape[:-1])), -1)
    return StoredTensor(tensor.name, kind, shape, rows)
