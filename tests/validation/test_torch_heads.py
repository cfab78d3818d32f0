"""The heads that `validate` compares with, of transformers' modules, against the equations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.validation.torch_heads import TorchEagle3
from tests.heads_tiny import HIDDEN, Random, Target, make_target
from tests.tiny import VOCAB_SIZE
from tests.tiny_eagle3 import CASES, fuse, reference

ATOL = 5e-5  # fp32 against fp64; logits and states are of the order of ten


@dataclass(frozen=True)
class Matrices:
    """All that a head's step reads of the target."""

    embedding: torch.Tensor
    output_matrix: torch.Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", CASES)
def test_a_head_of_transformers_modules_equals_the_equation(
    name: str, target: Target, tmp_path: Path
) -> None:
    case = CASES[name]
    matrices: Any = Matrices(target.embedding.float(), target.lm_head.float())
    head = TorchEagle3(matrices, str(case.write(tmp_path / "head")), target.config, "fp32")
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 9).tolist()
    taps = Random(9).matrix(len(ids), 3 * HIDDEN) * 5
    features = fuse(case.weights(), taps)
    np.testing.assert_allclose(head.features(taps), features, atol=ATOL)
    expected_logits, expected_states = reference(case, target, ids, features)
    logits, states = head.run(ids, features.float())
    np.testing.assert_allclose(logits, expected_logits, atol=ATOL)
    np.testing.assert_allclose(states, expected_states, atol=ATOL)
