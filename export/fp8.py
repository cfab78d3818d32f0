"""Block-scaled FP8 checkpoints (DeepSeek-V3): weights are dequantized when they are read.

`quantization_config` says `{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [R, C]}`;
beside `X.weight` (F8_E4M3) lies `X.weight_scale_inv`, one factor for each block of R x C elements,
the last ones cut off where the matrix ends.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"
BlockSize = tuple[int, int]


def read_block_size(config: Mapping[str, Any]) -> BlockSize | None:
    """Block size of an FP8 checkpoint, None of an unquantized one.

    Raises `CheckpointError` for any other quantization.
    """
    if not (quantization := config.get("quantization_config")):
        return None
    settings = quantization if isinstance(quantization, dict) else {}
    method, size = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8":
        raise CheckpointError(
            f"The checkpoint is quantized ({method or 'by an unknown method'}). "
            "Give the unquantized checkpoint, or one in block-scaled FP8 (DeepSeek-V3's kind)."
        )
    match size, settings.get("fmt", "e4m3"):
        case [int() as rows, int() as columns], "e4m3" if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(
        f"The checkpoint is quantized (fp8, fmt {settings.get('fmt')!r}, weight_block_size "
        f"{size!r}); of FP8, e4m3 in blocks of two sizes is supported. "
        "Give the unquantized checkpoint."
    )


def dequantize(
    weight: NDArray[np.float32],  # [R, C]
    scale: NDArray[np.float32],  # [ceil(R / rows), ceil(C / columns)]
    block_size: BlockSize,
    name: str,
) -> NDArray[np.float32]:
    """Multiply each block by its factor, in place; raises `CheckpointError` on other shapes."""
    expected = tuple(-(-n // size) for n, size in zip(weight.shape, block_size, strict=False))
    if weight.ndim != 2 or scale.shape != expected:
        raise CheckpointError(
            f"{name} has shape {list(weight.shape)} and a scale of shape {list(scale.shape)}; "
            f"blocks of {block_size[0]} x {block_size[1]} call for {list(expected)}. "
            "The checkpoint is damaged; download it again."
        )
    rows, columns = block_size
    with np.errstate(all="ignore"):  # who reads the checkpoint looks for NaN and infinity
        for i, factors in enumerate(scale):
            weight[i * rows : (i + 1) * rows] *= np.repeat(factors, columns)[: weight.shape[1]]
    return weight
