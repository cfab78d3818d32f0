"""The reference of quantized bundles against gguf's quantizers of the same forms."""

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from specexport.export.build import BuildOptions, build
from specexport.export.manifest import WeightType
from specexport.export.methods import NoMethod
from specexport.validation.rounding import round_matrix, rounded_reference
from tests.tiny import make_model, write_checkpoint

KINDS: dict[WeightType, Kind] = {"int8": Kind.Q8_0, "int4": Kind.Q4_0}


@pytest.mark.parametrize("weight_type", KINDS)
def test_a_matrix_is_rounded_as_by_gguf(weight_type: WeightType) -> None:
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    kind = KINDS[weight_type]
    expected = gguf.dequantize(gguf.quants.quantize(matrix.numpy(), kind), kind)
    # gguf's scales are fp16.
    np.testing.assert_allclose(round_matrix(matrix, weight_type), expected, rtol=2**-10)


def test_a_matrix_is_rounded_to_fp8_as_by_ml_dtypes() -> None:
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    blocks = matrix.numpy().reshape(48, 3, 32)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(448)
    expected = (blocks / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    np.testing.assert_array_equal(round_matrix(matrix, "fp8"), expected.reshape(48, 96))


@pytest.mark.parametrize("weight_type", [*KINDS, "fp8"])
def test_vectors_and_ragged_matrices_are_left_alone(weight_type: WeightType) -> None:
    for shape in ((96,), (8, 48)):
        tensor = torch.randn(*shape)
        assert round_matrix(tensor, weight_type).equal(tensor)


def rounded_parameters(family: str, folder: Path, options: BuildOptions, **sizes: Any) -> Any:
    checkpoint = write_checkpoint(folder / "checkpoint", family, **sizes)
    spec = build(str(checkpoint), folder / "bundle", options).target
    model = rounded_reference(str(checkpoint), spec).model
    return dict(model.named_parameters()), dict(make_model(family, **sizes).named_parameters())


def num_levels(matrix: torch.Tensor) -> int:
    """Most different numbers in 32 neighbours."""
    return max(len(block.unique()) for block in matrix.detach().reshape(-1, 32))


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_matrices_are_rounded_to_their_own_types(tied: bool, tmp_path: Path) -> None:
    options = BuildOptions(method=NoMethod(), weight_type="int4")
    sizes = {"intermediate_size": 64, "tie_word_embeddings": tied}
    found, stored = rounded_parameters("llama", tmp_path, options, **sizes)
    output = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert found["model.embed_tokens.weight"].equal(stored["model.embed_tokens.weight"])
    assert found["lm_head.weight"].equal(round_matrix(stored[output], "int8"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert found[name].equal(round_matrix(stored[name], "int4"))
    assert num_levels(found[name]) <= 16 < num_levels(stored[name])


def test_routers_and_what_latent_attention_cuts_are_left_alone(tmp_path: Path) -> None:
    options = BuildOptions(method=NoMethod(), weight_type="int8")
    sizes = {"kv_lora_rank": 32, "moe_intermediate_size": 32}
    found, stored = rounded_parameters("deepseek_v3", tmp_path, options, **sizes)
    for name, parameter in found.items():
        if name.endswith((".mlp.gate.weight", "kv_b_proj.weight", "norm.weight")):
            assert parameter.equal(stored[name]), name
        if ".experts." in name:
            assert not parameter.equal(stored[name]), name
