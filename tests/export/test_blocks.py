"""Codes and scales against gguf's quantizers of the same form, onnx's packing, and the extremes."""

from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specexport.errors import CheckpointError
from specexport.export.blocks import pack_int4, quantize
from specexport.export.manifest import CodeType

CODE_TYPES: tuple[CodeType, ...] = ("int8", "int4", "fp8")


def random(*shape: int) -> Any:
    return np.random.default_rng(0).normal(0, 0.3, shape).astype(np.float32)


def dequantized(matrix: Any, code_type: CodeType) -> Any:
    codes, scales = quantize(matrix, code_type, "w")
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)


def test_int8_is_q8_0_of_gguf() -> None:
    matrix = random(48, 96)
    stored = gguf.quants.quantize(matrix, Kind.Q8_0).reshape(48, 3, 34)  # fp16 scale, 32 codes
    codes, scales = quantize(matrix, "int8", "w")
    np.testing.assert_array_equal(codes, stored[..., 2:].view(np.int8).reshape(48, 96))
    expected = stored[..., :2].copy().view(np.float16)[..., 0]
    np.testing.assert_allclose(scales, expected, rtol=2**-11)  # fp16 rounds


def test_fp8_is_torchs_e4m3_of_what_the_scale_leaves() -> None:
    matrix = random(48, 96)
    codes, scales = quantize(matrix, "fp8", "w")
    blocks = torch.from_numpy(matrix).reshape(48, 3, 32)
    expected = blocks.abs().amax(-1, keepdim=True) / 448
    np.testing.assert_array_equal(scales, expected[..., 0])
    bits = (blocks / expected).to(torch.float8_e4m3fn).view(torch.uint8)
    np.testing.assert_array_equal(codes.view(np.uint8), bits.reshape(48, 96))
    assert len(np.unique(codes.view(np.uint8))) > 100  # of 253


def test_int4_is_q4_0_of_gguf() -> None:
    matrix = random(48, 96)
    stored = gguf.quants.quantize(matrix, Kind.Q4_0).reshape(48, 3, 18)  # fp16 scale, 16 pairs
    codes, scales = quantize(matrix, "int4", "w")
    low, high = stored[..., 2:] & 15, stored[..., 2:] >> 4  # codes 0 to 15, first half then second
    expected = np.concatenate([low, high], axis=-1).astype(np.int8) - 8
    np.testing.assert_array_equal(codes, expected.reshape(48, 96))
    np.testing.assert_allclose(scales, stored[..., :2].copy().view(np.float16)[..., 0], rtol=2**-11)


@pytest.mark.parametrize("code_type", CODE_TYPES)
@given(
    arrays(
        np.float32,
        (3, 64),
        elements=st.floats(-(2.0**100), 2.0**100, width=32).map(lambda x: x * (abs(x) > 2.0**-100)),
    )
)
def test_no_number_is_off_by_more_than_its_scale_allows(code_type: CodeType, matrix: Any) -> None:
    codes, scales = quantize(matrix, code_type, "w")
    assert (np.abs(scales) > 0).all()
    step = np.repeat(np.abs(scales.astype(np.float64)), 32, axis=1)
    error = np.abs(dequantized(matrix, code_type) - matrix)
    if code_type == "fp8":  # half of the last of three bits of fraction, or of 2^-9 steps
        bound = np.maximum(np.abs(matrix) / 16, step * 2.0**-10)
    else:  # half a step; a whole one where int4 has no code 8 for a number as large as the extreme
        bound = np.where((codes == 7) & (code_type == "int4"), step, step / 2)
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_a_block_of_zeros_stays_zero(code_type: CodeType) -> None:
    matrix = random(2, 64)
    matrix[:, 32:] = 0
    codes, scales = quantize(matrix, code_type, "w")
    assert not codes[:, 32:].astype(np.float32).any()
    assert (scales[:, 1] == 1).all()
    assert not np.signbit(scales[:, 1]).any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_the_largest_number_is_met_whatever_its_sign(code_type: CodeType, sign: int) -> None:
    matrix = random(5, 32)
    matrix[:, 7] = sign * 2.0
    np.testing.assert_allclose(dequantized(matrix, code_type)[:, 7], sign * 2.0, rtol=1e-6)


def test_opposite_extremes_of_one_size() -> None:
    matrix = np.zeros((1, 32), np.float32)
    matrix[0, :2] = 4, -4
    np.testing.assert_allclose(dequantized(matrix, "int8")[0, :2], [4, -4], rtol=1e-6)
    np.testing.assert_array_equal(dequantized(matrix, "int4")[0, :2], [4, -3.5])  # there is no 8


@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_numbers_too_small_for_a_scale_become_zero(code_type: CodeType) -> None:
    tiny = np.full((1, 32), np.finfo(np.float32).smallest_subnormal, np.float32)
    codes, scales = quantize(tiny, code_type, "w")
    assert (scales == 1).all()
    assert not codes.astype(np.float32).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_quantized_as_the_same_numbers_in_fp32(dtype: Any) -> None:
    half = random(4, 64).astype(dtype)
    found, expected = quantize(half, "int4", "w"), quantize(half.astype(np.float32), "int4", "w")
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_many_rows_are_quantized_like_few() -> None:
    matrix = random(5001, 32)
    codes, scales = quantize(matrix, "int8", "w")
    tail = quantize(matrix[4990:], "int8", "w")
    np.testing.assert_array_equal(codes[4990:], tail[0])
    np.testing.assert_array_equal(scales[4990:], tail[1])


@pytest.mark.parametrize("code_type", CODE_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_by_name(code_type: CodeType, bad: float) -> None:
    matrix = random(2, 32)
    matrix[1, 3] = bad
    with pytest.raises(CheckpointError, match=f"layer.weight holds infinite .* {code_type} cannot"):
        quantize(matrix, code_type, "layer.weight")


@pytest.mark.parametrize("shape", [(32, 3), (64, 5), (32, 8)])
def test_int4_are_packed_as_onnx_unpacks_them(shape: tuple[int, int]) -> None:
    codes = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
    packed = pack_int4(codes)
    assert packed.nbytes == codes.size // 2
    tensor = onnx.TensorProto(
        data_type=onnx.TensorProto.INT4, dims=shape, raw_data=packed.tobytes()
    )
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor).astype(np.int8), codes)
