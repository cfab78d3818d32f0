"""Integers in blocks of 32: a matrix as codes and one scale for each block of its input axis.

`x ≈ scale * code` with `scale = max|x| / 127` (int8) or `/ 7` (int4) of the block and codes rounded
to nearest; symmetric, so there is no zero point, and no code is -128 or -8. A block of zeros has
scale 1. Two int4 share a byte, the first in the low half, as ONNX packs them.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Tensor

BLOCK_SIZE = 32
IntType = Literal["int8", "int4"]
LARGEST_CODE: dict[IntType, int] = {"int8": 127, "int4": 7}
_ROWS_AT_A_TIME = 4096

Codes = NDArray[np.int8]
Scales = NDArray[np.float32]


def quantize(matrix: Tensor, int_type: IntType, name: str) -> tuple[Codes, Scales]:
    """Codes [O, I] and scales [O, I / 32] of a matrix [O, I]; I is a multiple of 32.

    Raises `CheckpointError` for a matrix that holds infinities or NaN.
    """
    rows, columns = matrix.shape
    codes = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, columns // BLOCK_SIZE), np.float32)
    for start in range(0, rows, _ROWS_AT_A_TIME):  # fp32 copies of the whole would be large
        part = slice(start, start + _ROWS_AT_A_TIME)
        blocks = matrix[part].astype(np.float32).reshape(-1, columns // BLOCK_SIZE, BLOCK_SIZE)
        found, scales[part] = _quantize_blocks(blocks, LARGEST_CODE[int_type])
        codes[part] = found.reshape(-1, columns)
    if not np.isfinite(scales).all():
        raise CheckpointError(
            f"{name} holds infinite numbers or NaN, which {int_type} cannot. Is the file damaged?"
        )
    return codes, scales


def pack_int4(codes: Codes) -> NDArray[np.uint8]:
    """Two codes a byte in row-major order, the first in the low half; their number is even."""
    pairs = np.ascontiguousarray(codes).view(np.uint8).reshape(-1, 2)
    packed: NDArray[np.uint8] = (pairs[:, 0] & np.uint8(0x0F)) | (pairs[:, 1] << np.uint8(4))
    return packed


def _quantize_blocks(
    blocks: NDArray[np.float32],  # [rows, n, 32]
    largest: int,
) -> tuple[Codes, Scales]:
    magnitudes = np.abs(blocks).max(axis=-1)  # [rows, n]
    scales = magnitudes / np.float32(largest)
    scales[scales == 0] = 1
    with np.errstate(invalid="ignore"):
        codes = np.rint(blocks / scales[..., None])
        # A scale so small that it was rounded can give a code past the largest.
        return np.clip(codes, -largest, largest).astype(np.int8), scales
