"""Block-scaled FP8 checkpoints against torch's own float8 numbers in transformers' model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile
from specexport.errors import CheckpointError
from specexport.export.build import BuildOptions, build
from specexport.export.huggingface import HuggingFaceCheckpoint
from specexport.export.manifest import WeightType
from specexport.export.methods import NoMethod
from specexport.runtime.batch import Batch, Row
from tests.tiny import edit_config, make_model, write_checkpoint

BLOCK = (20, 16)  # most matrices end inside a block
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
FACTOR = "_scale_inv"


def is_quantized(name: str) -> bool:
    """DeepSeek leaves embedding, output matrix, norms and routers as they are."""
    return "proj" in name and name.endswith(".weight")


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 numbers and a factor a block, such that the largest of each block becomes 448."""
    rows, columns = BLOCK
    factors = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            place = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            factors[i, j] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / factors[i, j]).to(torch.float8_e4m3fn)
    return stored, factors


def expand(factors: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows, columns = BLOCK
    wide = factors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


@pytest.fixture
def fp8_checkpoint(tmp_path: Path) -> Path:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "deepseek_v3")
    tensors = load_file(checkpoint / "model.safetensors")
    for name in list(filter(is_quantized, tensors)):
        tensors[name], tensors[name + FACTOR] = quantize(tensors[name])
    for name, tensor in tensors.items():  # the rest in bf16, but factors and routing biases
        if tensor.dtype == torch.float32 and not name.endswith((FACTOR, "correction_bias")):
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    edit_config(checkpoint, quantization_config=QUANTIZATION)
    return checkpoint


def reference(checkpoint: Path, dtype: torch.dtype) -> Any:
    """transformers' model with the dequantized numbers, its matrices rounded to `dtype`."""
    tensors = load_file(checkpoint / "model.safetensors")
    source = write_checkpoint(checkpoint.parent / "dequantized", "deepseek_v3")
    plain = {}
    for name, tensor in tensors.items():
        if name + FACTOR in tensors:
            value = tensor.float() * expand(tensors[name + FACTOR], tensor.shape)
            plain[name] = value.to(dtype).float()
        elif not name.endswith(FACTOR):
            plain[name] = tensor.float()
    save_file(plain, source / "model.safetensors", metadata={"format": "pt"})
    return type(make_model("deepseek_v3")).from_pretrained(source, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("weight_type", "dtype"), [("fp32", torch.float32), (None, torch.bfloat16)]
)
def test_an_fp8_checkpoint_equals_transformers_with_dequantized_weights(
    weight_type: WeightType | None, dtype: torch.dtype, fp8_checkpoint: Path, tmp_path: Path
) -> None:
    options = BuildOptions(method=NoMethod(), weight_type=weight_type)
    manifest = build(str(fp8_checkpoint), tmp_path / "bundle", options)
    spec = manifest.target
    assert (spec.weight_type, spec.is_rounded) == (weight_type or "bf16", False)
    assert any("FP8 matrices are dequantized" in note for note in manifest.provenance.notes)
    ids = list(range(1, 30))
    with OrtRunner(tmp_path / "bundle" / spec.path, spec, Profile(max_length=64)) as runner:
        found = runner.run(Batch.build([Row(0, ids, len(ids))], 64).step).logits
    with torch.inference_mode():
        expected = reference(fp8_checkpoint, dtype)(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_factors_are_consumed_and_not_named(fp8_checkpoint: Path) -> None:
    checkpoint = HuggingFaceCheckpoint(fp8_checkpoint, "fp8")
    assert not [name for name in checkpoint.names() if name.endswith(FACTOR)]
    assert checkpoint.dtype("model.layers.0.self_attn.o_proj.weight") == "bf16"


def change(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    path = checkpoint / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, path, metadata={"format": "pt"})


NAME = "model.layers.0.mlp.up_proj.weight"


def test_a_missing_factor_is_named(fp8_checkpoint: Path) -> None:
    change(fp8_checkpoint, **{NAME + FACTOR: None})
    with pytest.raises(CheckpointError, match=f"holds {NAME} in FP8 but no {NAME}{FACTOR}"):
        HuggingFaceCheckpoint(fp8_checkpoint, "fp8")


def test_factors_of_another_shape_are_refused(fp8_checkpoint: Path) -> None:
    change(fp8_checkpoint, **{NAME + FACTOR: torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match=r"scale of shape \[1, 1\]; .* call for \[3, 2\]"):
        HuggingFaceCheckpoint(fp8_checkpoint, "fp8").tensor(NAME)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_factor_that_makes_no_numbers_is_refused(value: float, fp8_checkpoint: Path) -> None:
    change(fp8_checkpoint, **{NAME + FACTOR: torch.full((3, 2), value)})
    with pytest.raises(CheckpointError, match=f"fp8: {NAME} holds NaN or infinite numbers"):
        HuggingFaceCheckpoint(fp8_checkpoint, "fp8").tensor(NAME)


def test_a_factor_without_its_fp8_matrix_is_not_dropped(
    fp8_checkpoint: Path, tmp_path: Path
) -> None:
    change(fp8_checkpoint, **{NAME: torch.ones(48, 32)})
    with pytest.raises(CheckpointError, match=f"does not call for.*{NAME}{FACTOR}"):
        build(str(fp8_checkpoint), tmp_path / "bundle")


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_block_size": None},
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": 128},
        {"fmt": "e5m2"},
    ],
)
def test_other_kinds_of_fp8_are_refused(changes: dict[str, Any], fp8_checkpoint: Path) -> None:
    edit_config(fp8_checkpoint, quantization_config={**QUANTIZATION, **changes})
    with pytest.raises(CheckpointError, match=r"quantized \(fp8, .* Give the unquantized"):
        HuggingFaceCheckpoint(fp8_checkpoint, "fp8")


def test_fp8_without_its_settings_is_refused(fp8_checkpoint: Path, tmp_path: Path) -> None:
    edit_config(fp8_checkpoint, quantization_config=None)
    with pytest.raises(CheckpointError, match="scale_inv"):
        build(str(fp8_checkpoint), tmp_path / "bundle")
