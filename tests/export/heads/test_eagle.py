"""EAGLE-1/2 heads step by step through the cache against the paper's equation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.errors import CheckpointError
from specexport.export.heads.eagle import plan_eagle
from specexport.export.heads.head_checkpoint import open_head
from tests.heads_tiny import (
    CAPACITY,
    HIDDEN,
    Random,
    StepSession,
    Target,
    Tensors,
    make_target,
    write_head,
)
from tests.tiny import VOCAB_SIZE
from tests.tiny_eagle import CASES, CONFIG, Case, reference

# fp32 against fp64; logits and states are of the order of ten.
ATOL = 5e-5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("tied")
    return make_target(folder, num_hidden_layers=1, tie_word_embeddings=True)


@pytest.mark.parametrize("name", CASES)
def test_each_draft_step_equals_the_equation_on_the_whole_sequence(
    name: str, target: Target, tied_target: Target, tmp_path: Path
) -> None:
    case = CASES[name]
    lender = tied_target if case.tied else target
    w, config = case.weights(), case.full_config
    head = open_head(write_head(tmp_path / "head", config, w, case.kind))
    plan = plan_eagle(head, lender.config)
    assert (plan.layout, plan.taps, plan.token_map) == ("EAGLE-1/2", ("norm",), None)
    assert plan.tensors.renamed == {name: name for name in w}

    session = StepSession(plan, lender, tmp_path, rows=2)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (5, 3)]
    features = [Random(9 + row).matrix(len(ids[row]), HIDDEN) * 5 for row in range(2)]
    new_ids, new_features = [list(row) for row in ids], list(features)
    for _ in range(5):  # the target's features once, then four recycled ones
        logits, recycled = session.run(new_ids, new_features)
        for row in range(2):
            expected_logits, states = reference(w, config, lender, ids[row], features[row])
            np.testing.assert_allclose(logits[row], expected_logits[-1], atol=ATOL)
            np.testing.assert_allclose(recycled[row], states[-1], atol=ATOL)
            new_ids[row] = [int(expected_logits[-1].argmax())]
            new_features[row] = states[-1:]
            ids[row] = ids[row] + new_ids[row]
            features[row] = torch.cat([features[row], states[-1:]])
    assert [len(row) for row in ids] == [10, 8]


def test_the_embedding_and_output_matrix_of_the_target_are_not_stored_again(
    target: Target, tmp_path: Path
) -> None:
    head = open_head(write_head(tmp_path / "head", CONFIG, Case().weights()))
    graphs = plan_eagle(head, target.config).build(target.graph.builder, "fp32", CAPACITY)
    assert graphs.step is not None
    assert sorted(graphs.step.builder.borrowed) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert not any(VOCAB_SIZE in w.shape for w in graphs.step.builder.weights.values())


@pytest.mark.parametrize("altered", [False, True])
def test_a_copy_of_the_targets_embedding_is_stored_once(
    altered: bool, target: Target, tmp_path: Path
) -> None:
    w = {**Case().weights(), "embed_tokens.weight": target.embedding.float()}
    w["embed_tokens.weight"][-1, -1] += 0.5 if altered else 0
    plan = plan_eagle(
        open_head(write_head(tmp_path / "head", CONFIG, w)), target.config, target.checkpoint
    )
    assert ("embed_tokens.weight" in plan.tensors.renamed) == altered
    assert plan.notes == (
        () if altered else ("The head's embedding is the target's: stored once.",)
    )
    features = Random(9).matrix(3, HIDDEN)
    ids = [4, 9, VOCAB_SIZE - 1]
    logits, _ = StepSession(plan, target, tmp_path).run([ids], [features])
    expected, _ = reference(w, CONFIG, target, ids, features)
    np.testing.assert_allclose(logits[-1], expected[-1], atol=ATOL)


def changed(**changes: torch.Tensor | None) -> Tensors:
    found = {**Case().weights(), **{k.replace("__", "."): v for k, v in changes.items()}}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "an EAGLE-3 head": (
        CONFIG,
        changed(midlayer__hidden_norm__weight=torch.ones(HIDDEN)),
        r"is an EAGLE-3 head.*'midlayer\.hidden_norm\.weight'. Use --method eagle3",
    ),
    "no fc": (CONFIG, changed(fc__weight=None), r"lacks 1 tensor.*EAGLE-1/2.*'fc\.weight'"),
    "a layer missing": (
        {**CONFIG, "num_hidden_layers": 2},
        changed(),
        r"num_hidden_layers is 2, but the weights are those of 1 layer",
    ),
    "an input norm on the first layer": (
        CONFIG,
        changed(layers__0__input_layernorm__weight=torch.ones(HIDDEN)),
        r"holds 1 tensor.*'layers\.0\.input_layernorm\.weight'",
    ),
    "a final norm": (
        CONFIG,
        changed(model__norm__weight=torch.ones(HIDDEN)),
        r"holds 1 tensor.*'model\.norm\.weight'",
    ),
    "one bias of three": (
        CONFIG,
        changed(layers__0__self_attn__q_proj__bias=torch.ones(64)),
        r"lacks 2 tensor.*'layers\.0\.self_attn\.k_proj\.bias'",
    ),
    "another hidden size": (
        {**CONFIG, "hidden_size": 64},
        changed(),
        "has hidden_size 64, the target 32",
    ),
    "weights of another config": (
        {**CONFIG, "intermediate_size": 41},
        changed(),
        r"layers\.0\.mlp\.gate_proj\.weight has shape \[40, 32\]; \[41, 32\] was expected",
    ),
    "an embedding of fewer tokens": (
        CONFIG,
        changed(embed_tokens__weight=torch.ones(100, HIDDEN)),
        r"embed_tokens\.weight has 100 rows, but the target has 272 tokens",
    ),
    "no config": ({}, changed(), "config.json of the head: vocab_size is missing"),
    "another activation": ({**CONFIG, "hidden_act": "gelu"}, changed(), "hidden_act is 'gelu'"),
    "a quantized head": (
        {**CONFIG, "quantization_config": {"quant_method": "awq"}},
        changed(),
        "head is quantized",
    ),
    "heads that do not fit": (
        {**CONFIG, "num_key_value_heads": 3},
        changed(),
        "must be a multiple",
    ),
    "one tensor twice": (
        CONFIG,
        changed(model__fc__weight=torch.ones(1)),
        r"one tensor under two names, 'fc\.weight' and 'model\.fc\.weight'",
    ),
    "an embedding that is none": (
        CONFIG,
        changed(embed_tokens__weight=torch.tensor(1.0)),
        r"embed_tokens\.weight has shape \[\]; a matrix was expected",
    ),
    "windows on some layers": (
        {
            **CONFIG,
            "num_hidden_layers": 2,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        changed(),
        "all layers with one window, or none",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str, target: Target, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[what]
    head = open_head(write_head(tmp_path / "head", config, tensors))
    with pytest.raises(CheckpointError, match=message):
        plan_eagle(head, target.config).build(target.graph.builder, "fp32", CAPACITY)


def test_rotary_frequencies_in_the_file_are_not_needed(target: Target, tmp_path: Path) -> None:
    tensors = changed(layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    plan = plan_eagle(open_head(write_head(tmp_path / "head", CONFIG, tensors)), target.config)
    assert plan.build(target.graph.builder, "fp32", CAPACITY).step is not None
    assert "layers.0.self_attn.rotary_emb.inv_freq" not in plan.tensors.renamed.values()
