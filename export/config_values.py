"""The keys of config.json that are read, with the types and ranges that they must have."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specexport.errors import CheckpointError

Size = Annotated[int, Field(gt=0, le=2**31 - 1)]
NumLayers = Annotated[int, Field(gt=0, le=10_000)]
Positive = Annotated[float, Field(gt=0)]
M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Values of the right JSON type or an error; other keys of the file are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class ConfigValues(Strict):
    """A decoder's config.json; keys without a default must be there."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: Size
    max_position_embeddings: Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    hidden_act: str
    tie_word_embeddings: bool
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = False
    rope_interleave: bool = False
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Field(ge=0)] | None = 28
    layer_types: list[str] | None = None


class RopeValues(Strict):
    """The numbers of `rope_parameters` or `rope_scaling`."""

    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: Annotated[float, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    truncate: bool = True
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    frequency_factors: list[Positive] | None = None


def check_values(model: type[M], values: Mapping[str, Any], where: str) -> M:
    """Validate; raises `CheckpointError` naming the first key that is wrong, and what it holds."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        came = "missing" if first["type"] == "missing" else repr(first["input"])[:80]
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise CheckpointError(
            f"{where}: {key} is {came}; {reason}. Is the file complete and of this model?"
        ) from None
