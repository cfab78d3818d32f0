"""Rotary settings from either spelling: `rope_parameters` or `rope_theta` + `rope_scaling`."""

from collections.abc import Mapping
from typing import Any, get_args

from specexport.errors import CheckpointError
from specexport.export.config import RopeConfig, RopeType

# Key of the file → field of RopeConfig, per type. Any other key is refused, so that no setting
# is dropped in silence.
_FIELDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor", "original_max_position_embeddings": "original_max_position"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
_REQUIRED = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "frequency_factors"}


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Read the rotary settings; raises `CheckpointError` on an unknown type or key."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in _FIELDS:
        raise CheckpointError(
            f"Unsupported RoPE scaling type {rope_type!r}. "
            f"Supported: {', '.join(get_args(RopeType))}."
        )
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise CheckpointError(f"partial_rotary_factor is {partial}; only 1.0 is supported.")
    known = _FIELDS[rope_type]
    for key, value in scaling.items():
        if key not in known and key not in _COMMON_KEYS and value is not None:
            raise CheckpointError(
                f"Unknown RoPE setting {key!r} for type {rope_type!r}. Known: "
                f"{', '.join(sorted(set(known) | _COMMON_KEYS))}."
            )
    if missing := {key for key in _REQUIRED.get(rope_type, set()) if scaling.get(key) is None}:
        raise CheckpointError(f"RoPE type {rope_type!r} needs {', '.join(sorted(missing))}.")
    fields = {known[key]: v for key, v in scaling.items() if key in known and v is not None}
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if rope_type == "dynamic":
        # transformers scales dynamic RoPE from max_position_embeddings, whatever else is given.
        fields["original_max_position"] = max_position
    original = fields.setdefault("original_max_position", max_position)
    if rope_type == "yarn":
        fields.setdefault("factor", max_position / original)
    if factors := scaling.get("frequency_factors"):
        fields["frequency_factors"] = tuple(factors)
    return RopeConfig(
        theta=10000.0 if theta is None else float(theta), rope_type=rope_type, **fields
    )
