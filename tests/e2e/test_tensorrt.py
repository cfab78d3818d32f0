"""The real SmolLM2-135M-Instruct as a plan, built ahead of time; nothing is run."""

import os
from pathlib import Path

import pytest

from specexport.export.tensorrt.engines import add_engines
from specexport.export.tensorrt.wanted import WantedEngine

pytestmark = pytest.mark.model
pytest.importorskip("tensorrt_rtx", reason="plans need tensorrt-rtx: pip install 'specexport[rtx]'")


def test_smollm2_builds_with_its_whole_context(smollm2_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    for path in smollm2_bundle.rglob("*"):
        if path.is_file():
            (bundle / path.relative_to(smollm2_bundle)).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, bundle / path.relative_to(smollm2_bundle))
    wanted = WantedEngine("tensorrt-rtx", ("sm89", "sm120"), "fp16")
    manifest = add_engines(bundle, [wanted], lambda what: None)
    plan = manifest.engines[0].plans["target"]
    least = 8192 + 6 + 262  # the text, a draft, and a chunk with a draft
    assert least <= plan.cache_length < least + 128
    weights = manifest.files["target/model.weights"].size_bytes  # fp32
    # Products read fp16, the embedding is looked up in fp32; kernels for two GPUs come on top.
    assert weights / 2 < plan.size_bytes < weights
