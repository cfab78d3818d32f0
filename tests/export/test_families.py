"""Settings of the expert and latent-attention families that cannot be honoured are refused."""

from typing import Any

import pytest

from specexport.errors import CheckpointError
from specexport.export.families import FAMILIES, read_config

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GROUPED = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}


def read(architecture: str, **values: Any) -> Any:
    return read_config({"architectures": [architecture], **SIZES, **values})


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3NextForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "MixtralForCausalLM",
    ],
)
def test_other_routings_and_bodies_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(CheckpointError, match=f"Unsupported architecture: {architecture}"):
        read(architecture)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"n_group": 3}, "16 experts in 3 groups"),
        ({"topk_group": 5}, "of which 5 are kept"),
        ({"n_group": 16}, "16 groups of 1 expert"),
        ({"num_experts_per_tok": 9}, "asks for 9 experts a token; 8 can be chosen"),
        ({"n_routed_experts": "16"}, "n_routed_experts is '16'"),
        ({"norm_topk_prob": None}, "norm_topk_prob is None"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"qk_rope_head_dim": 7, "kv_lora_rank": 9}, "rotates 7 dimensions"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
    ],
)
def test_a_deepseek_config_that_cannot_be_honoured_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    assert read("DeepseekV3ForCausalLM", **GROUPED).moe.num_groups == 4
    with pytest.raises(CheckpointError, match=message):
        read("DeepseekV3ForCausalLM", **{**GROUPED, **changes})


def test_a_deepseek_config_without_groups_has_one() -> None:
    moe = read("DeepseekV3ForCausalLM", **{**GROUPED, "n_group": None, "topk_group": None}).moe
    assert (moe.num_groups, moe.top_groups) == (1, 1)


def test_partial_rotary_is_glms_alone() -> None:
    assert read("Glm4MoeForCausalLM", head_dim=16).rotary_dim == 8  # half is the default
    assert read("Glm4MoeForCausalLM", head_dim=16, partial_rotary_factor=0.25).rotary_dim == 4
    for architecture in sorted(FAMILIES.keys() - {"Glm4MoeForCausalLM"}):
        with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.5"):
            read(architecture, max_position_embeddings=64, partial_rotary_factor=0.5)
    inside = {"rope_type": "default", "partial_rotary_factor": 0.5}
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.5"):
        read("LlamaForCausalLM", rope_parameters=inside)


def test_a_rotation_of_an_odd_number_of_dimensions_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rotates 5 dimensions"):
        read("Glm4MoeForCausalLM", head_dim=20, partial_rotary_factor=0.25)


@pytest.mark.parametrize(
    ("architecture", "changes", "dense"),
    [
        ("Qwen3MoeForCausalLM", {}, set()),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 3]}, {0, 3}),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, {0, 2}),
        ("DeepseekV3ForCausalLM", {}, {0, 1, 2}),
        ("Glm4MoeForCausalLM", {}, {0}),
        ("Ernie4_5_MoeForCausalLM", {}, {0}),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": 2}, {0, 3}),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_interval": 2}, {0, 2}),
    ],
)
def test_layers_without_experts_are_those_of_the_config(
    architecture: str, changes: dict[str, Any], dense: set[int]
) -> None:
    assert read(architecture, **changes).moe.dense_layers == dense


def test_ernies_rotary_base_has_its_own_default() -> None:
    assert read("Ernie4_5ForCausalLM").rope.theta == 500000.0
    assert read("Ernie4_5ForCausalLM", rope_theta=1e4).rope.theta == 1e4
