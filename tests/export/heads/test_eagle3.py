"""EAGLE-3 heads of every producer, step by step through the cache, against the paper's equation."""

from collections.abc import Callable
from dataclasses import dataclass, field
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
    HEAD_DIM,
    HIDDEN,
    LAYER_CONFIG,
    Random,
    StepSession,
    Target,
    Tensors,
    attention,
    layer_weights,
    linear,
    make_target,
    mlp,
    open_graph,
    rms_norm,
    write_head,
)
from tests.tiny import VOCAB_SIZE

V_DRAFT = 90
# fp32 against fp64; logits and states are of the order of ten.
ATOL = 5e-5
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


def draft_ids() -> torch.Tensor:
    """The target's ids of a reduced vocabulary, rising."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(5))[:V_DRAFT].sort()[
        0
    ]


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def legacy_norms(name: str) -> str:
    for i, level in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{i}.", f"aux_norm_{level}.")
    return midlayer(name)


def as_it_is(name: str) -> str:
    return name


def with_prefix(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"


@dataclass(frozen=True)
class Case:
    """A head as one producer publishes it."""

    layout: str
    config: dict[str, Any]
    spell: Callable[[str], str] = midlayer
    kind: str = "safetensors"
    size: int = HIDDEN
    head_dim: int = HEAD_DIM
    num_layers: int = 1
    reduced: bool = True
    with_t2d: bool = True
    own_embedding: bool = False
    own_lm_head: bool = True
    fc_norm: bool = False
    input_norm: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()
    fc_bias: bool = False
    layer_config: dict[str, Any] = field(default_factory=lambda: LAYER_CONFIG)
    norm_before_residual: bool = False
    norm_output: bool = False

    def weights(self) -> Tensors:
        """By the names of the equation, which are ModelOpt's."""
        random = Random()
        w = layer_weights(
            random,
            "layers.0",
            size=self.size,
            input_size=2 * self.size,
            head_dim=self.head_dim,
            biases=self.biases,
        )
        for i in range(1, self.num_layers):
            w |= layer_weights(random, f"layers.{i}", size=self.size, head_dim=self.head_dim)
            w[f"layers.{i}.input_layernorm.weight"] = random.norm(self.size)
        w["fc.weight"] = random.matrix(self.size, 3 * HIDDEN)
        for name in ("layers.0.hidden_norm", "layers.0.input_layernorm", "norm"):
            w[f"{name}.weight"] = random.norm(self.size)
        if self.fc_bias:
            w["fc.bias"] = random.matrix(self.size)
        if self.own_embedding:
            w["embed_tokens.weight"] = random.matrix(VOCAB_SIZE, self.size)
        if self.own_lm_head:
            w["lm_head.weight"] = random.matrix(V_DRAFT if self.reduced else VOCAB_SIZE, self.size)
        if self.fc_norm:
            w |= {f"fc_norm.{i}.weight": random.norm(HIDDEN) for i in range(3)}
        if self.input_norm:
            w["input_norm.weight"] = random.norm(3 * HIDDEN)
        if self.qk_norm:
            w |= {f"layers.0.self_attn.{x}_norm.weight": random.norm(self.head_dim) for x in "qk"}
        return w

    def tensors(self) -> Tensors:
        """As the file holds them."""
        found = {self.spell(name): tensor for name, tensor in self.weights().items()}
        if self.reduced:
            found["d2t"] = draft_ids() - torch.arange(V_DRAFT)
            if self.with_t2d:
                found["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), draft_ids())
        return found

    def write(self, folder: Path) -> Path:
        return write_head(folder, self.config, self.tensors(), self.kind)


SAFEAI = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": V_DRAFT}
SPECFORGE = {**SAFEAI, "architectures": ["LlamaForCausalLMEagle3"]}
MODELOPT = {
    **SPECFORGE,
    "rope_scaling": {"rope_type": "default", "rope_theta": 5000.0},
    "attention_bias": False,
    "pretraining_tp": None,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    },
}
ANGELSLIM = {
    **SAFEAI,
    "architectures": ["Eagle3LlamaForCausalLM"],
    "tie_word_embeddings": True,
    "aux_hidden_states_layer_ids": [1, 3, 4],
}


def speculators(layers: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": V_DRAFT,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        **config,
    }


QWEN3_LAYERS = {
    **{key: value for key, value in LAYER_CONFIG.items() if key != "rope_theta"},
    "model_type": "qwen3",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "max_window_layers": 28,
}
NARROW = {**LAYER_CONFIG, "hidden_size": 24, "target_hidden_size": HIDDEN}

CASES = {
    "SafeAILab": Case(
        "SafeAILab",
        {**SAFEAI, "head_dim": None},
        kind="bin",
        head_dim=8,
        layer_config={**LAYER_CONFIG, "head_dim": None},
    ),
    "SafeAILab, whole vocabulary": Case(
        "SafeAILab", {**SAFEAI, "draft_vocab_size": VOCAB_SIZE}, reduced=False
    ),
    "SafeAILab, narrower than the target": Case(
        "SafeAILab",
        {**SAFEAI, **NARROW},
        size=24,
        own_embedding=True,
        layer_config=NARROW,
    ),
    "SpecForge": Case("SpecForge", SPECFORGE, own_embedding=True, kind="safetensors-shards"),
    "SpecForge, llama3 RoPE": Case(
        "SpecForge",
        {**SPECFORGE, "rope_scaling": LLAMA3},
        layer_config={**LAYER_CONFIG, "rope_scaling": LLAMA3},
    ),
    "SpecForge, EAGLE-3.1": Case(
        "SpecForge",
        {**SPECFORGE, "fc_norm": True, "norm_output": True},
        fc_norm=True,
        norm_output=True,
    ),
    "SpecForge, older EAGLE-3.1": Case(
        "SpecForge", {**SPECFORGE, "use_aux_norm": True}, spell=legacy_norms, fc_norm=True
    ),
    "ModelOpt": Case("ModelOpt", MODELOPT, spell=as_it_is, with_t2d=False),
    "ModelOpt, biases": Case(
        "ModelOpt",
        {**MODELOPT, "attention_bias": True, "mlp_bias": True},
        spell=as_it_is,
        biases=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        fc_bias=True,
    ),
    "ModelOpt, the target's output matrix": Case(
        "ModelOpt",
        {**MODELOPT, "draft_vocab_size": VOCAB_SIZE},
        spell=as_it_is,
        reduced=False,
        own_lm_head=False,
    ),
    "AngelSlim": Case("AngelSlim", ANGELSLIM, own_embedding=True),
    "speculators, Llama": Case(
        "speculators",
        speculators(LAYER_CONFIG),
        spell=as_it_is,
        own_embedding=True,
        norm_before_residual=True,
    ),
    "speculators, Qwen3": Case(
        "speculators",
        speculators(QWEN3_LAYERS, norm_before_residual=False, norm_before_fc=True),
        spell=as_it_is,
        qk_norm=True,
        input_norm=True,
    ),
    "speculators, two layers": Case(
        "speculators",
        speculators({**LAYER_CONFIG, "num_hidden_layers": 2}, norm_before_residual=True),
        spell=as_it_is,
        num_layers=2,
        norm_before_residual=True,
    ),
    "prefixed names": Case("SafeAILab", SAFEAI, spell=with_prefix),
    "tied to its own embedding": Case(
        "SafeAILab",
        {**SAFEAI, "tie_word_embeddings": True, "draft_vocab_size": None},
        reduced=False,
        own_embedding=True,
        own_lm_head=False,
    ),
}


def fuse(w: Tensors, taps: torch.Tensor) -> torch.Tensor:  # [M, 3 * H_target] -> [M, H]
    x = taps.double()
    if "input_norm.weight" in w:
        x = rms_norm(x, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        parts = x.chunk(3, dim=-1)
        x = torch.cat([rms_norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], dim=-1)
    return linear(w, "fc", x)


def reference(
    case: Case, target: Target, ids: list[int], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and recycled states of all rows of one sequence."""
    w = case.weights()
    table = w.get("embed_tokens.weight", target.embedding).double()
    e = rms_norm(table[ids], w["layers.0.input_layernorm.weight"])
    g = rms_norm(features, w["layers.0.hidden_norm.weight"])
    x, read = g if case.norm_before_residual else features, torch.cat([e, g], dim=-1)
    for i in range(case.num_layers):
        name, positions = f"layers.{i}", torch.arange(len(ids))
        if i > 0:
            read = rms_norm(x, w[f"{name}.input_layernorm.weight"])
        h = x + attention(w, f"{name}.self_attn", read, positions, case.layer_config)
        x = h + mlp(w, f"{name}.mlp", rms_norm(h, w[f"{name}.post_attention_layernorm.weight"]))
    normed = rms_norm(x, w["norm.weight"])
    output = w.get(
        "lm_head.weight", table if case.config["tie_word_embeddings"] else target.lm_head
    )
    return normed @ output.double().T, normed if case.norm_output else x


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
        (found,) = fusing.run(["features"], {"hidden_states": taps[row].numpy()})
        np.testing.assert_allclose(found, features[row], atol=ATOL)
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
        "norm_output is 'yes'; expected true or false",
    ),
    "multi-head latent attention": (
        changed("ModelOpt", {}, layers__0__self_attn__kv_a_proj_with_mqa__weight=torch.ones(2)),
        r"multi-head latent attention \(Eagle3DeepseekV2ForCausalLM\)",
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
