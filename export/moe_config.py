"""Mixture-of-experts settings of each family's config.json.

Sources: transformers' `modeling_qwen3_moe.py`, `modeling_deepseek_v3.py`, `modeling_glm4_moe.py`
and `modeling_ernie4_5_moe.py`; the keys are those of the published checkpoints.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from specexport.errors import CheckpointError
from specexport.export.config import MoeConfig
from specexport.export.config_values import NumLayers, Size, Strict, check_values

Config = Mapping[str, Any]
Index = Annotated[int, Field(ge=0)]
_WHERE = "config.json, experts"


class _Qwen3Moe(Strict):
    num_hidden_layers: NumLayers
    # transformers 5 writes the first name, the published files have the second.
    num_experts: Size = Field(validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    norm_topk_prob: bool
    decoder_sparse_step: Size
    mlp_only_layers: list[Index] | None = None


class _DeepseekMoe(Strict):
    n_routed_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    n_shared_experts: Index | None
    norm_topk_prob: bool
    routed_scaling_factor: Annotated[float, Field(gt=0)]
    n_group: Size | None
    topk_group: Size | None
    first_k_dense_replace: Annotated[int, Field(ge=0, le=10_000)]
    # transformers knows one value of each of these, and reads none of them.
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_layer_freq: int = 1


class _ErnieMoe(Strict):
    num_hidden_layers: NumLayers
    moe_num_experts: Size
    moe_k: Size
    moe_intermediate_size: Size
    moe_num_shared_experts: Index
    moe_layer_start_index: Index
    moe_layer_end_index: Annotated[int, Field(ge=-1)]
    moe_layer_interval: Size
    moe_norm_min: Annotated[float, Field(ge=0)]


def read_qwen3_moe(config: Config) -> MoeConfig:
    """Softmax over all experts; every `decoder_sparse_step`-th layer but `mlp_only_layers`."""
    values = check_values(_Qwen3Moe, config, _WHERE)
    step, plain = values.decoder_sparse_step, set(values.mlp_only_layers or ())
    layers = range(values.num_hidden_layers)
    return _checked(
        MoeConfig(
            num_experts=values.num_experts,
            experts_per_token=values.num_experts_per_tok,
            intermediate_size=values.moe_intermediate_size,
            scoring="softmax",
            normalize=values.norm_topk_prob,
            dense_layers=frozenset(i for i in layers if i in plain or (i + 1) % step),
        )
    )


def read_deepseek_moe(config: Config) -> MoeConfig:
    """DeepSeek-V3 and GLM-4.5: sigmoid scores, a bias for choosing, groups, shared experts."""
    values = check_values(_DeepseekMoe, config, _WHERE)
    _refuse_others(values)
    return _checked(
        MoeConfig(
            num_experts=values.n_routed_experts,
            experts_per_token=values.num_experts_per_tok,
            intermediate_size=values.moe_intermediate_size,
            scoring="sigmoid",
            normalize=values.norm_topk_prob,
            norm_floor=1e-20,
            scaling=values.routed_scaling_factor,
            choice_bias="gate.e_score_correction_bias",
            choice_bias_shape=(values.n_routed_experts,),
            num_groups=values.n_group or 1,
            top_groups=values.topk_group or 1,
            shared_intermediate_size=values.moe_intermediate_size * (values.n_shared_experts or 0),
            dense_layers=frozenset(range(values.first_k_dense_replace)),
        )
    )


def read_ernie_moe(config: Config) -> MoeConfig:
    """Softmax scores, a bias for choosing; experts in every n-th layer of a range."""
    values = check_values(_ErnieMoe, config, _WHERE)
    first, last = values.moe_layer_start_index, values.moe_layer_end_index
    last = values.num_hidden_layers - 1 if last == -1 else last
    layers, interval = range(values.num_hidden_layers), values.moe_layer_interval
    shared = values.moe_num_shared_experts
    return _checked(
        MoeConfig(
            num_experts=values.moe_num_experts,
            experts_per_token=values.moe_k,
            intermediate_size=values.moe_intermediate_size,
            scoring="softmax",
            normalize=True,
            norm_floor=values.moe_norm_min,
            choice_bias="moe_statics.e_score_correction_bias",
            choice_bias_shape=(1, values.moe_num_experts),
            shared_intermediate_size=values.moe_intermediate_size * shared,
            dense_layers=frozenset(
                i for i in layers if (i + 1) % interval or not first <= i <= last
            ),
        )
    )


def _refuse_others(values: _DeepseekMoe) -> None:
    known = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for key, value in known.items():
        if (found := getattr(values, key)) != value:
            raise CheckpointError(
                f"config.json: {key} is {found!r}; this family is supported with {value!r} only."
            )


def _checked(moe: MoeConfig) -> MoeConfig:
    """Raise `CheckpointError` where routing could not choose what it must."""
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups:
        raise CheckpointError(
            f"config.json has {moe.num_experts} experts in {moe.num_groups} groups, of which "
            f"{moe.top_groups} are kept: groups must be equal and no more kept than there are. "
            "The file is damaged or of another model."
        )
    group_size = moe.num_experts // moe.num_groups
    if group_size < 2 and moe.top_groups < moe.num_groups:
        raise CheckpointError(
            f"config.json has {moe.num_groups} groups of {group_size} expert; a group counts by "
            "its two best experts. The file is damaged or of another model."
        )
    if moe.experts_per_token > moe.top_groups * group_size:
        raise CheckpointError(
            f"config.json asks for {moe.experts_per_token} experts a token; "
            f"{moe.top_groups * group_size} can be chosen. "
            "The file is damaged or of another model."
        )
    return moe
