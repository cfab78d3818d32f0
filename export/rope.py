"""Rotary tables: cos and sin of every position, for each scaling type.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (2306.15595); dynamic NTK as in
transformers' decoding with a cache; YaRN (2309.00071); Llama 3.1's frequency bands.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specexport.export.config import RopeConfig

Array = NDArray[np.float64]


def rotary_tables(
    rope: RopeConfig, head_dim: int, length: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cos and sin tables, each [length, head_dim / 2], fp32."""
    positions = np.arange(length, dtype=np.float64)[:, None]
    frequencies = _FREQUENCIES[rope.rope_type](rope, head_dim, positions)
    if rope.frequency_factors is not None:
        frequencies = frequencies / np.asarray(rope.frequency_factors)
    # The models multiply in fp32: rounding both factors as they do keeps far positions equal.
    angles = positions.astype(np.float32) * frequencies.astype(np.float32)
    scale = np.float32(attention_scale(rope))
    return np.cos(angles) * scale, np.sin(angles) * scale


def attention_scale(rope: RopeConfig) -> float:
    """YaRN's factor on cos and sin (its attention temperature); 1 for the other types."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def softmax_scale(rope: RopeConfig) -> float:
    """DeepSeek's other YaRN temperature, on latent attention's scores: squared `mscale_all_dim`."""
    if rope.rope_type != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return _mscale(rope.factor, rope.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _base_frequencies(theta: float | Array, head_dim: int) -> Array:  # [1 or length, D/2]
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return np.asarray(1.0 / theta**exponents)


def _default(rope: RopeConfig, head_dim: int, positions: Array) -> Array:
    return _base_frequencies(rope.theta, head_dim)


def _linear(rope: RopeConfig, head_dim: int, positions: Array) -> Array:
    return _base_frequencies(rope.theta, head_dim) / rope.factor


def _dynamic(rope: RopeConfig, head_dim: int, positions: Array) -> Array:
    """Each position gets the base of the length that it completes.

    That is what transformers computes when it decodes token by token with a cache: a token's key
    keeps the rotation of the moment it was written. It makes the table independent of chunking.
    """
    length = np.maximum(positions + 1, rope.original_max_position)
    growth = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    return _base_frequencies(rope.theta * growth ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(rope: RopeConfig, head_dim: int, positions: Array) -> Array:
    """High frequencies stay, low ones are divided by `factor`, the band between is blended."""
    base = _base_frequencies(rope.theta, head_dim)
    rotations = rope.original_max_position * base / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = np.clip((rotations - low) / (high - low), 0, 1)
    return np.asarray(keep * base + (1 - keep) * base / rope.factor)


def _yarn(rope: RopeConfig, head_dim: int, positions: Array) -> Array:
    """Blend interpolation and extrapolation by how often a dimension rotates (eq. 17-23)."""
    base = _base_frequencies(rope.theta, head_dim)

    def dimension(rotations: float) -> float:  # the dimension that rotates so often in the context
        context = rope.original_max_position
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolate = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return np.asarray(interpolate * base / rope.factor + (1 - interpolate) * base)


_FREQUENCIES: dict[str, Callable[[RopeConfig, int, Array], Array]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
