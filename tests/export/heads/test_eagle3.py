"""EAGLE-3 heads of every producer, step by step through the cache, against the paper's equation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.errors import CheckpointError
from specexport.export.heads.eagle3 import plan_eagle3
from specexport.export.heads.head_checkpoint import open_head
from tests.heads_tiny import (
    CAPACITY,
    HIDDEN,
    Random,
    StepSession,
    Target,
    make_target,
    open_graph,
    write_head,
)
from tests.tiny import VOCAB_SIZE
from tests.tiny_eagle3 import CASES, V_DRAFT, draft_ids, fuse, reference

# fp32 against fp64; logits and states are of the order of ten.
ATOL = 5e-5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", CASES)
def test_each_draft_step_equals_the_equation_on_the_whole_sequence(
    name: str, target: Target, tmp_path: Path
) -> None:
    case = CASES[name]
    plan = plan_eagle3(open_head(case.write(tmp_path / "head")), target.config)
    assert plan.layout == f"EAGLE-3, {case.layout}"
    assert plan.taps == (1, 3, 4)
    assert set(plan.tensors.renamed.values()) == set(case.tensors()) - {"d2t", "t2d"}
    to_target = torch.arange(VOCAB_SIZE)
    if case.reduced:
        to_target = draft_ids()
        assert plan.token_map is not None
        assert plan.token_map.tolist() == to_target.tolist()
    else:
        assert plan.token_map is None

    session = StepSession(plan, target, tmp_path, rows=2)
    assert session.graphs.fuse is not None
    fusing = open_graph(session.graphs.fuse, plan, target.folder, f"{tmp_path.name}.fuse")
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (5, 3)]
    taps = [Random(9 + row).matrix(len(ids[row]), 3 * HIDDEN) * 5 for row in range(2)]
    features = [fuse(case.weights(), t) for t in taps]
    for row in range(2):
        (fused,) = fusing.run(["features"], {"hidden_states": taps[row].numpy()})
        np.testing.assert_allclose(fused, features[row], atol=ATOL)
    new_ids, new_features = [list(row) for row in ids], list(features)
    for _ in range(5):  # the target's features once, then four recycled ones
        logits, recycled = session.run(new_ids, new_features)
        for row in range(2):
            expected_logits, states = reference(case, target, ids[row], features[row])
            np.testing.assert_allclose(logits[row], expected_logits[-1], atol=ATOL)
            np.testing.assert_allclose(recycled[row], states[-1], atol=ATOL)
            new_ids[row] = [int(to_target[expected_logits[-1].argmax()])]
            new_features[row] = states[-1:]
            ids[row] = ids[row] + new_ids[row]
            features[row] = torch.cat([features[row], states[-1:]])
    assert [len(row) for row in ids] == [10, 8]


def changed(name: str, config: dict[str, Any], **changes: torch.Tensor | None) -> Any:
    """A case of `CASES` with other config keys ("remove" takes one out) and tensors."""
    case = CASES[name]
    tensors = {**case.tensors(), **{k.replace("__", "."): v for k, v in changes.items()}}
    merged = {k: v for k, v in {**case.config, **config}.items() if v != "remove"}
    return merged, {k: v for k, v in tensors.items() if v is not None}


LATENT = "ModelOpt, latent attention"
IDS = "eagle_aux_hidden_state_layer_ids"
ABSOLUTE, SHIFTED = draft_ids(), draft_ids() + 1 - torch.arange(V_DRAFT)
REFUSED = {
    "a reduced vocabulary without d2t": (
        changed("SafeAILab", {}, d2t=None),
        "predicts 90 tokens of the target's 272, but lacks the tensor 'd2t'",
    ),
    "absolute ids instead of offsets": (
        changed("ModelOpt", {}, d2t=ABSOLUTE),
        "d2t leads to the token id .*; the target has ids 0 to 271",
    ),
    "d2t that contradicts t2d": (
        changed("SpecForge", {}, d2t=SHIFTED.clamp(max=VOCAB_SIZE - V_DRAFT)),
        "d2t and t2d contradict each other, first at the token id",
    ),
    "two draft ids for one token": (
        changed("ModelOpt", {}, d2t=torch.where(torch.arange(V_DRAFT) == 1, -1, 0)),
        "d2t leads 2 draft ids to the token id 0",
    ),
    "d2t of another length": (
        changed("ModelOpt", {}, d2t=torch.zeros(50, dtype=torch.int64)),
        "d2t has 50 entries, the output matrix 90 rows",
    ),
    "no output matrix of a reduced vocabulary": (
        changed("SafeAILab", {}, lm_head__weight=None),
        r"no output matrix .*\[272, 32\] does not fit its \[90, 32\]",
    ),
    "no output matrix of a narrower head": (
        changed(
            "SafeAILab, narrower than the target",
            {"draft_vocab_size": "remove"},
            lm_head__weight=None,
            d2t=None,
        ),
        r"no output matrix .*\[272, 32\] does not fit its \[272, 24\]",
    ),
    "a narrower head without embedding": (
        changed("SafeAILab, narrower than the target", {}, embed_tokens__weight=None),
        "has no embedding .*hidden_size 24 is not the target's 32",
    ),
    "another draft_vocab_size": (
        changed("SafeAILab", {"draft_vocab_size": 91}),
        r"says draft_vocab_size 91, but lm_head\.weight has 90 rows",
    ),
    "a target of another width": (
        changed("SafeAILab", {}, fc__weight=torch.ones(HIDDEN, 3 * 48)),
        r"fc\.weight has shape \[32, 144\]; 3 hidden states .* hidden_size 32 have 96 numbers",
    ),
    "more layers than fc takes": (
        changed("ModelOpt", {"eagle_config": {IDS: [1, 3, 4, 5]}}),
        r"fc\.weight has shape \[32, 96\]; 4 hidden states",
    ),
    "a layer that the target does not have": (
        changed("ModelOpt", {"eagle_config": {IDS: [1, 3, 9]}}),
        r"layers \[1, 3, 9\] \(eagle_config.*the target has layers 0 to 7",
    ),
    "a norm that the config promises": (
        changed("SpecForge, EAGLE-3.1", {}, fc_norm__1__weight=None),
        r"lacks 1 tensor.*'fc_norm\.1\.weight'",
    ),
    "all norms that the config promises": (
        changed("SpecForge", {"fc_norm": True}),
        r"config\.json says fc_norm, but .* holds no 'fc_norm\.0\.weight'",
    ),
    "an input norm that the config promises": (
        changed("ModelOpt", {"eagle_config": {"norm_before_fc": True}}),
        r"config\.json says norm_before_fc, but .* holds no 'input_norm\.weight'",
    ),
    "no final norm": (
        changed("SafeAILab", {}, norm__weight=None),
        r"lacks 1 tensor.*EAGLE-3, SafeAILab.*'norm\.weight'",
    ),
    "a tensor that it does not read": (
        changed("SafeAILab", {}, midlayer__extra__weight=torch.ones(3)),
        r"holds 1 tensor.*'midlayer\.extra\.weight'",
    ),
    "an EAGLE-1 head": (
        changed("SafeAILab", {}, midlayer__hidden_norm__weight=None),
        r"no EAGLE-3 head.*Use --method eagle for",
    ),
    "a flag that is no truth value": (
        changed("SafeAILab", {"norm_output": "yes"}),
        "norm_output is 'yes'; input should be a valid boolean",
    ),
    "architectures that are no list": (
        changed("SpecForge", {"architectures": 5}),
        "config.json of the head: architectures is 5; input should be a valid list",
    ),
    "settings that are no object": (
        changed("ModelOpt", {"eagle_config": [1]}),
        r"eagle_config is \[1\]; input should be",
    ),
    "many layers": (
        changed("SafeAILab", {"num_hidden_layers": 10_000}),
        "num_hidden_layers is 10000, but the weights are those of 1 layer",
    ),
    "more layers than any model has": (
        changed("SafeAILab", {"num_hidden_layers": 1_000_000_000}),
        "num_hidden_layers is 1000000000; input should be less than or equal to 10000",
    ),
    "an output matrix that is none": (
        changed("SafeAILab", {}, lm_head__weight=torch.tensor(1.0)),
        r"lm_head\.weight has shape \[\]; a matrix was expected",
    ),
    "an embedding that is none": (
        changed("SafeAILab, narrower than the target", {}, embed_tokens__weight=torch.ones(300)),
        r"embed_tokens\.weight has shape \[300\]; a matrix was expected",
    ),
    "an fc that is none": (
        changed("SafeAILab", {}, fc__weight=torch.tensor(1.0)),
        r"fc\.weight has shape \[\]; a matrix was expected",
    ),
    "a tensor named almost like d2t": (
        changed("SafeAILab", {}, extra_d2t=torch.ones(3)),
        "holds 1 tensor.*'extra_d2t'",
    ),
    "latents of no size": (
        changed(LATENT, {"kv_lora_rank": 0}),
        "latent attention: kv_lora_rank is 0; input should be greater than 0",
    ),
    "a size of latent attention that is no number": (
        changed(LATENT, {"v_head_dim": "8"}),
        "latent attention: v_head_dim is '8'; input should be a valid integer",
    ),
    "sizes of latent attention that are not the file's": (
        changed(LATENT, {"qk_nope_head_dim": "remove"}),  # DeepSeek's 128
        r"kv_b_proj\.weight has shape \[80, 40\]; \[544, 40\] was expected",
    ),
    "queries in two steps that the config does not promise": (
        changed(LATENT, {"q_lora_rank": None}),
        r"lacks 1 tensor.*'layers\.0\.self_attn\.q_proj\.weight'",
    ),
    "a part of latent attention": (
        changed("ModelOpt", {}, layers__0__self_attn__kv_a_proj_with_mqa__weight=torch.ones(2)),
        r"lacks 5 tensor.*'layers\.0\.self_attn\.kv_a_layernorm\.weight'",
    ),
    "P-EAGLE by its tensor": (
        changed("speculators, Llama", {}, mask_hidden=torch.ones(1, 1, 96)),
        "drafts all tokens in one pass",
    ),
    "P-EAGLE by its config": (
        changed("speculators, Llama", {"speculators_model_type": "peagle"}),
        "drafts all tokens in one pass",
    ),
    "P-EAGLE by its mask token": (
        changed("ModelOpt", {"ptd_token_id": 0}),
        "drafts all tokens in one pass",
    ),
    "parallel heads": (
        changed("ModelOpt", {"eagle_config": {"parallel_draft_step": 4}}),
        r"parallel draft heads \(eagle_config.parallel_draft_step\)",
    ),
    "no intermediate layers": (
        changed("ModelOpt", {"eagle_config": {"use_aux_hidden_state": False}}),
        "use_aux_hidden_state is false",
    ),
    "another algorithm of speculators": (
        changed("speculators, Llama", {"speculators_model_type": "dflash"}),
        "of speculators' kind 'dflash'",
    ),
    "sections of a multimodal RoPE": (
        changed("SafeAILab", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
        "Unsupported RoPE scaling type 'mrope'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str, target: Target, tmp_path: Path) -> None:
    (config, tensors), message = REFUSED[what]
    head = open_head(write_head(tmp_path / "head", config, tensors))
    with pytest.raises(CheckpointError, match=message):
        plan_eagle3(head, target.config).build(target.graph.builder, "fp32", CAPACITY)


def test_a_stored_output_matrix_is_believed_whatever_the_config_ties(
    target: Target, tmp_path: Path
) -> None:
    case = CASES["AngelSlim"]
    assert case.config["tie_word_embeddings"] is True
    plan = plan_eagle3(open_head(case.write(tmp_path / "head")), target.config)
    step = plan.build(target.graph.builder, "fp32", CAPACITY).step
    assert step is not None
    assert step.builder.weights["lm_head.weight"].shape == (V_DRAFT, HIDDEN)
    assert step.builder.borrowed == {}


@pytest.mark.parametrize("name", ["AngelSlim", "tied to its own embedding"])
def test_a_copy_of_the_targets_embedding_is_borrowed_unless_it_is_the_output_matrix(
    name: str, target: Target, tmp_path: Path
) -> None:
    case = CASES[name]
    tensors = case.tensors()
    copied = {case.spell("embed_tokens.weight"): target.embedding.float()}
    head = open_head(write_head(tmp_path / "head", case.config, {**tensors, **copied}))
    plan = plan_eagle3(head, target.config, target.checkpoint)
    assert ("embed_tokens.weight" in plan.tensors.renamed) == (not case.own_lm_head)
    step = plan.build(target.graph.builder, "fp32", CAPACITY).step
    assert step is not None
    expected = ["model.embed_tokens.weight"] if case.own_lm_head else []
    assert list(step.builder.borrowed) == expected
