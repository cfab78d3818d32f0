"""The reference of `validate` on the families that transformers treats in a way of its own."""

from pathlib import Path

import numpy as np
import torch

from specexport.validation.reference import Reference
from tests.tiny import make_model, write_checkpoint

IDS = list(range(1, 20))


def test_mimo_is_loaded_as_the_qwen2_that_it_is(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "mimo", hidden_size=64)
    with torch.inference_mode():
        expected = make_model("mimo", hidden_size=64)(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(Reference(str(checkpoint)).logits(IDS), expected, atol=1e-6)


def test_routers_are_not_rounded_and_matrices_are(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "ernie4_5_moe")
    parameters = dict(Reference(str(checkpoint), "bf16").model.named_parameters())
    stored = dict(make_model("ernie4_5_moe").named_parameters())
    for name, parameter in parameters.items():
        rounded = parameter.equal(parameter.to(torch.bfloat16).float())
        is_router = "gate.weight" in name or "e_score_correction_bias" in name
        assert rounded == (parameter.ndim > 1 and not is_router), name
        if not rounded:
            assert parameter.equal(stored[name]), name
