"""A multi-token-prediction module in a target's checkpoint is left out, a stray tensor is not."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specexport.errors import CheckpointError
from specexport.export.build import build
from specexport.export.manifest import read_manifest
from specexport.export.mtp_tensors import mtp_tensors
from tests.tiny import write_checkpoint

DEEPSEEK = (
    "model.layers.2.eh_proj.weight",
    "model.layers.2.enorm.weight",
    "model.layers.2.hnorm.weight",
    "model.layers.2.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight",
    "model.layers.2.mlp.experts.0.up_proj.weight",
)
MODULES = {
    "DeepSeek-V3, GLM-4.5": DEEPSEEK,
    "MiMo": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"),
    "Qwen3-Next": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"),
    "Ernie-4.5": (
        "model.mtp_block.0.mlp.up_proj.weight",
        "model.mtp_emb_norm.0.weight",
        "model.mtp_hidden_norm.0.weight",
        "model.mtp_linear_proj.0.weight",
    ),
}
OWN = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight")


def add(checkpoint: Path, names: tuple[str, ...]) -> None:
    path = checkpoint / "model.safetensors"
    extra = {name: np.ones((2, 2), dtype=np.float32) for name in names}
    save_file({**load_file(path), **extra}, path)


@pytest.mark.parametrize("family", MODULES)
def test_a_module_is_recognised_by_its_names(family: str) -> None:
    assert mtp_tensors([*OWN, *MODULES[family]], num_layers=2) == set(MODULES[family])


def test_several_appended_layers_are_one_module() -> None:
    names = [f"model.layers.{i}.{part}.weight" for i in (2, 3) for part in ("eh_proj", "enorm")]
    assert mtp_tensors([*OWN, *names], num_layers=2) == set(names)


def test_a_further_layer_without_a_module_is_none() -> None:
    assert mtp_tensors([*OWN, "model.layers.2.mlp.up_proj.weight"], num_layers=2) == set()
    # Nor is a target's own layer, whatever it holds.
    assert mtp_tensors([*OWN, "model.layers.1.eh_proj.weight"], num_layers=2) == set()


@pytest.mark.parametrize("family", MODULES)
def test_build_leaves_a_module_out_and_says_so(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    plain = build(str(checkpoint), tmp_path / "plain")
    add(checkpoint, MODULES[family])
    build(str(checkpoint), tmp_path / "bundle")
    manifest = read_manifest(tmp_path / "bundle")
    assert manifest.provenance.notes == (
        "The checkpoint holds a multi-token-prediction module; --method mtp uses it.",
    )
    assert manifest.target.num_parameters == plain.target.num_parameters


def test_a_stray_layer_is_still_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    add(checkpoint, ("model.layers.2.mlp.up_proj.weight",))
    with pytest.raises(CheckpointError, match=r"not call for, first 'model\.layers\.2"):
        build(str(checkpoint), tmp_path / "bundle")
