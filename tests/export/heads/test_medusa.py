"""Medusa heads of every layout against the paper's equation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.errors import CheckpointError
from specexport.export.heads.head_checkpoint import open_head
from specexport.export.heads.medusa import plan_medusa
from specexport.export.heads.plan import HeadPlan
from tests.heads_tiny import (
    CAPACITY,
    HIDDEN,
    Random,
    Target,
    Tensors,
    make_target,
    open_graph,
    write_head,
)
from tests.tiny import VOCAB_SIZE
from tests.tiny_medusa import NUM_HEADS, classic, reference, vllm, weights

# fp32 against fp64; logits are of the order of one, sums have 32 terms.
ATOL = 1e-5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"), num_hidden_layers=1)


def run(plan: HeadPlan, target: Target, name: str, hidden: torch.Tensor) -> Any:
    graphs = plan.build(target.graph.builder, "fp32", CAPACITY)
    assert graphs.medusa is not None
    session = open_graph(graphs.medusa, plan, target.folder, name)
    return session.run(["logits"], {"hidden_states": hidden.numpy()})[0]


CASES: dict[str, tuple[str, Tensors, dict[str, Any] | None, bool]] = {
    "FasterDecoding": ("bin", classic(weights()), {"medusa_num_heads": 2}, True),
    "ModelOpt": (
        "safetensors",
        classic(weights(), "medusa_heads."),
        {"medusa": {"medusa_num_heads": 5, "medusa_num_layers": 1}},
        True,
    ),
    "vLLM": ("safetensors-shards", vllm(weights(bias=False)), None, False),
}


@pytest.mark.parametrize("producer", CASES)
def test_logits_of_every_head_equal_the_equation(
    producer: str, target: Target, tmp_path: Path
) -> None:
    kind, tensors, config, bias = CASES[producer]
    head = open_head(write_head(tmp_path / "head", config, tensors, kind))
    plan = plan_medusa(head, target.config)
    assert plan.layout == f"Medusa, {producer}"
    assert plan.taps == ("norm",)
    assert plan.token_map is None
    assert set(plan.tensors.renamed.values()) == set(tensors)
    hidden = Random(1).matrix(5, HIDDEN) * 5
    expected = reference(weights(bias=bias), hidden)
    assert expected.shape == (5, NUM_HEADS, VOCAB_SIZE)
    np.testing.assert_allclose(run(plan, target, tmp_path.name, hidden), expected, atol=ATOL)


def test_a_single_file_without_config_is_a_head_too(target: Target, tmp_path: Path) -> None:
    torch.save(classic(weights()), tmp_path / "medusa_lm_head.pt")
    hidden = Random(1).matrix(2, HIDDEN)
    for source in (tmp_path, tmp_path / "medusa_lm_head.pt"):
        plan = plan_medusa(open_head(source), target.config)
        found = run(plan, target, tmp_path.name, hidden)
        np.testing.assert_allclose(found, reference(weights(), hidden), atol=ATOL)


def test_a_token_map_names_the_targets_ids_themselves(target: Target, tmp_path: Path) -> None:
    ids = torch.tensor([9, 3, 200, 41])
    tensors = {**vllm(weights(vocab_size=4)), "token_map": ids}
    plan = plan_medusa(open_head(write_head(tmp_path / "head", {}, tensors)), target.config)
    assert plan.token_map is not None
    assert plan.token_map.tolist() == ids.tolist()
    hidden = Random(1).matrix(2, HIDDEN)
    expected = reference(weights(vocab_size=4), hidden)
    np.testing.assert_allclose(run(plan, target, tmp_path.name, hidden), expected, atol=ATOL)


def test_a_token_map_beside_whole_heads_is_noted_and_not_used(
    target: Target, tmp_path: Path
) -> None:
    tensors = {**vllm(weights()), "token_map": torch.tensor([9, 3, 200, 41])}
    plan = plan_medusa(open_head(write_head(tmp_path / "head", {}, tensors)), target.config)
    assert plan.token_map is None
    assert plan.notes == ("token_map is not used: the heads are stored for the whole vocabulary.",)


@pytest.mark.parametrize("stored", [True, False])
def test_the_targets_output_matrix_is_used_where_the_config_says_so(
    stored: bool, target: Target, tmp_path: Path
) -> None:
    heads = weights()
    tensors = {name: t for name, t in vllm(heads).items() if not name.startswith("lm_heads")}
    shared = heads[0]["out"] if stored else target.lm_head.float()
    if stored:
        tensors["lm_heads.0.weight"] = shared
    head = open_head(write_head(tmp_path / "head", {"original_lm_head": True}, tensors))
    plan = plan_medusa(head, target.config)
    hidden = Random(1).matrix(2, HIDDEN)
    expected = reference([{**head, "out": shared} for head in heads], hidden)
    np.testing.assert_allclose(run(plan, target, tmp_path.name, hidden), expected, atol=ATOL)


def changed(tensors: Tensors, **changes: torch.Tensor | None) -> Tensors:
    found = {**tensors, **{k.replace("__", "."): v for k, v in changes.items()}}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


NO_OUTPUTS = {k: v for k, v in classic(weights()).items() if "linear" in k}
REFUSED: dict[str, tuple[Tensors, str]] = {
    "no output matrices": (NO_OUTPUTS, "3 Medusa heads without an output matrix.*original_lm_head"),
    "one output matrix missing": (
        changed(classic(weights()), **{"1__2__weight": None}),
        r"lacks 1 tensor.*'heads\.1\.lm_head\.weight'",
    ),
    "a block missing": (
        changed(classic(weights()), **{"2__1__linear__weight": None}),
        r"lacks 1 tensor.*'heads\.2\.blocks\.1\.weight'",
    ),
    "a head number far above the others": (
        changed(classic(weights()), **{"20000000__0__linear__weight": torch.ones(HIDDEN, HIDDEN)}),
        "heads up to number 20000000 .* no block 0 of head 3",
    ),
    "a block number far above the others": (
        changed(classic(weights()), **{"0__20000000__linear__weight": torch.ones(HIDDEN, HIDDEN)}),
        "blocks up to number 20000000, but no block 2 of head 0",
    ),
    "a number of a thousand digits": (
        changed(classic(weights()), **{f"{'9' * 5000}__0__linear__weight": torch.ones(1)}),
        "holds 1 tensor.*'9999",
    ),
    "one tensor twice": (
        changed(classic(weights()), **{"blocks__0__layers__0__weight": torch.ones(1)}),
        r"one tensor under two names, '0\.0\.linear\.weight' and 'blocks\.0\.layers\.0\.weight'",
    ),
    "an output matrix that is none": (
        changed(classic(weights()), **{"0__2__weight": torch.tensor(1.0)}),
        r"0\.2\.weight has shape \[\]; a matrix was expected",
    ),
    "a bias missing": (
        changed(classic(weights()), **{"0__0__linear__bias": None}),
        r"lacks 1 tensor.*'heads\.0\.blocks\.0\.bias'",
    ),
    "a tensor that no head reads": (
        changed(classic(weights()), **{"0__norm__weight": torch.ones(HIDDEN)}),
        r"holds 1 tensor.*'0\.norm\.weight'",
    ),
    "another hidden size": (
        changed(classic(weights()), **{"0__0__linear__weight": torch.ones(48, 48)}),
        r"0\.0\.linear\.weight has shape \[48, 48\]; \[32, 32\] was expected",
    ),
    "another vocabulary": (
        classic(weights(vocab_size=100)),
        "predict 100 tokens, the target has 272, and there is no tensor 'token_map'",
    ),
    "a token map of another length": (
        {**vllm(weights(vocab_size=4)), "token_map": torch.tensor([1, 2, 3])},
        "predict 4 tokens, but token_map has 3 entries",
    ),
    "a token map past the target": (
        {**vllm(weights(vocab_size=2)), "token_map": torch.tensor([1, 272])},
        "token_map leads to the token id 272; the target has ids 0 to 271",
    ),
    "a token twice": (
        {**vllm(weights(vocab_size=2)), "token_map": torch.tensor([5, 5])},
        "token_map leads 2 draft ids to the token id 5",
    ),
    "another method's head": (
        {"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)},
        r"holds no Medusa heads.*'fc\.weight'. Choose another --method",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str, target: Target, tmp_path: Path) -> None:
    tensors, message = REFUSED[what]
    head = open_head(write_head(tmp_path / "head", {}, tensors))
    with pytest.raises(CheckpointError, match=message):
        plan_medusa(head, target.config).build(target.graph.builder, "fp32", CAPACITY)
