"""Rotary settings from either spelling: `rope_parameters` or `rope_theta` + `rope_scaling`."""

from collections.abc import Mapping
from typing import Any, get_args

from specexport.errors import CheckpointError
from specexport.export.config import RopeConfig, RopeType
from specexport.export.config_values import RopeValues, check_values

# Keys that each type reads. Any other is refused, so that no setting is dropped in silence.
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_REQUIRED = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "frequency_factors"}


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Read the rotary settings; raises `CheckpointError` on an unknown type, key or bad value."""
    # transformers lets rope_scaling win where a file has both.
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"config.json: the RoPE settings are {found!r}; expected an object.")
    scaling = {key: value for key, value in found.items() if value is not None}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    _check_keys(rope_type, scaling)
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    values = check_values(
        RopeValues,
        {
            **scaling,
            "rope_theta": 10000.0 if theta is None else theta,
            "partial_rotary_factor": 1.0 if partial is None else partial,
        },
        "config.json, RoPE settings",
    )
    original = _original_max_position(rope_type, values, config, max_position)
    fields = values.model_dump(exclude_none=True, exclude={"original_max_position_embeddings"})
    if rope_type == "yarn":
        fields.setdefault("factor", max_position / original)
    if (factors := fields.pop("frequency_factors", None)) is not None:
        fields["frequency_factors"] = tuple(factors)
    rope = RopeConfig(
        theta=fields.pop("rope_theta"),
        rope_type=rope_type,
        original_max_position=original,
        **fields,
    )
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointError(
            f"RoPE type 'llama3' needs low_freq_factor ({rope.low_freq_factor}) below "
            f"high_freq_factor ({rope.high_freq_factor})."
        )
    return rope


def _check_keys(rope_type: object, scaling: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for what no formula here would read, or would miss."""
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        raise CheckpointError(
            f"Unsupported RoPE scaling type {rope_type!r}. "
            f"Supported: {', '.join(get_args(RopeType))}."
        )
    known = _KEYS[rope_type] | _COMMON_KEYS
    if unknown := sorted(set(scaling) - known):
        raise CheckpointError(
            f"Unknown RoPE setting {unknown[0]!r} for type {rope_type!r}. "
            f"Known: {', '.join(sorted(known))}."
        )
    if missing := _REQUIRED.get(rope_type, set()) - set(scaling):
        raise CheckpointError(f"RoPE type {rope_type!r} needs {', '.join(sorted(missing))}.")


def _original_max_position(
    rope_type: str, values: RopeValues, config: Mapping[str, Any], max_position: int
) -> int:
    """The context before scaling, as transformers finds it."""
    if rope_type in ("yarn", "llama3"):  # a value beside the settings wins over one inside
        outside = config.get("original_max_position_embeddings")
        inside = values.original_max_position_embeddings
        checked = check_values(
            RopeValues, {"original_max_position_embeddings": outside}, "config.json"
        )
        return checked.original_max_position_embeddings or inside or max_position
    # Dynamic scaling counts from max_position_embeddings, whatever else is given.
    return max_position
