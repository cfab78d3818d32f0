"""Rotary tables against transformers' own, and the two spellings of the config."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specexport.errors import CheckpointError
from specexport.export.config import RopeConfig
from specexport.export.rope import rotary_tables
from specexport.export.rope_config import read_rope

HEAD_DIM, MAX_POSITION = 64, 128

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, all keys": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}


def reference_tables(scaling: dict[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """transformers' cos and sin, position by position as a decoder with a cache asks for them."""
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default", **scaling},
    )
    rotary = LlamaRotaryEmbedding(config)
    x = torch.zeros(1, 1, HEAD_DIM)
    pairs = [rotary(x, torch.tensor([[p]])) for p in range(2 * MAX_POSITION)]
    half = HEAD_DIM // 2
    return (
        np.stack([cos[0, 0, :half].numpy() for cos, _ in pairs]),
        np.stack([sin[0, 0, :half].numpy() for _, sin in pairs]),
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_those_of_transformers(name: str) -> None:
    scaling = SCALINGS[name]
    rope = read_rope({"rope_parameters": {"rope_theta": 5000.0, **scaling}}, MAX_POSITION)
    cos, sin = rotary_tables(rope, HEAD_DIM, 2 * MAX_POSITION)
    expected_cos, expected_sin = reference_tables(scaling)
    # fp32 frequencies of either side round differently: one part in 1e7, times 256 positions.
    np.testing.assert_allclose(cos, expected_cos, atol=5e-5)
    np.testing.assert_allclose(sin, expected_sin, atol=5e-5)


@pytest.mark.parametrize("name", SCALINGS)
def test_both_spellings_give_the_same(name: str) -> None:
    scaling = SCALINGS[name]
    new = read_rope({"rope_parameters": {"rope_theta": 1e6, **scaling}}, MAX_POSITION)
    old = dict(scaling)
    if "rope_type" in old:
        old["type"] = old.pop("rope_type")
    assert read_rope({"rope_theta": 1e6, "rope_scaling": old or None}, MAX_POSITION) == new


def test_frequency_factors_of_a_gguf_file_divide_the_frequencies() -> None:
    llama3 = read_rope({"rope_parameters": SCALINGS["llama3"]}, MAX_POSITION)
    plain = read_rope({}, MAX_POSITION)
    positions = np.zeros((1, 1))
    from specexport.export.rope import _default, _llama3

    factors = (_default(plain, 64, positions) / _llama3(llama3, 64, positions)).ravel().tolist()
    given = {"rope_parameters": {"rope_theta": 10000.0, "frequency_factors": factors}}
    rope = read_rope(given, MAX_POSITION)
    for ours, expected in zip(
        rotary_tables(rope, 64, 50), rotary_tables(llama3, 64, 50), strict=True
    ):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "Unsupported RoPE scaling type 'longrope'"),
        ({"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}, "'short_factor'"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs high_freq_factor, low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ],
)
def test_an_unknown_setting_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope({"rope_parameters": scaling}, MAX_POSITION)


def test_theta_defaults_as_in_transformers() -> None:
    assert read_rope({}, MAX_POSITION) == RopeConfig(
        theta=10000.0, original_max_position=MAX_POSITION
    )
