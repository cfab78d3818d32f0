"""The types in which caches are stored."""

import ml_dtypes
import numpy as np
import pytest

from specexport.engines.stored import STORED, from_stored, to_stored
from specexport.export.engine_spec import FloatType


def _values() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Any bit pattern, subnormal and infinite ones too, and what lies between two bf16."""
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = np.arange(0, 2**16, dtype=np.uint32) << 16 | 0x8000
    named = np.array([0.0, -0.0, np.inf, -np.inf, 1.0, 3.3895314e38], dtype=np.float32)
    return np.concatenate([bits.view(np.float32), ties.view(np.float32), named])


def test_bf16_is_that_of_ml_dtypes() -> None:
    values = _values()
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    found = to_stored(values, "bf16")
    assert found.dtype == STORED["bf16"]
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(found[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(from_stored(found[~numbers], "bf16")).all()
    np.testing.assert_array_equal(from_stored(found, "bf16"), expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_what_was_stored_once_is_stored_without_a_change(kind: FloatType) -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    stored = to_stored(values, kind)
    np.testing.assert_array_equal(to_stored(from_stored(stored, kind), kind), stored)
    assert from_stored(stored, kind).dtype == np.float32
    np.testing.assert_allclose(from_stored(stored, kind), values, rtol=2**-8)
