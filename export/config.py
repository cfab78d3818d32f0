"""The numbers that define a decoder, read from a `config.json` of any supported family."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and how its frequencies are scaled.

    `frequency_factors` (GGUF's `rope_freqs.weight`) divides each frequency, after scaling.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP."""

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @property
    def context_length(self) -> int:
        """Positions that the model is meant for; dynamic RoPE goes past `max_position`."""
        factor = self.rope.factor if self.rope.rope_type == "dynamic" else 1.0
        return int(self.max_position * factor)
