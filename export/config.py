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
    partial_rotary_factor: float = 1.0
    """The share of a head's dimensions, the first ones, that is rotated."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from a latent.

    A layer caches one entry a token: the normalised latent, then the rotated key of all heads.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    """None: queries are projected in one step."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool
    """On the projections down to the latents, and on the output's."""

    @property
    def entry_dim(self) -> int:
        """Size of a cache entry."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Size of a query and of the key that it meets, before the latent takes the key's place."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts: how a token's experts are chosen and weighted, and their sizes."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"]
    normalize: bool
    """Divide the chosen scores by their sum, which is taken as `norm_floor` at least."""
    norm_floor: float = 0.0
    scaling: float = 1.0
    """Factor on the weights."""
    choice_bias: str | None = None
    """Tensor, under the layer's `mlp.`, added to the scores for choosing alone (2408.15664)."""
    choice_bias_shape: tuple[int, ...] = ()
    num_groups: int = 1
    top_groups: int = 1
    """Experts come from the groups with the largest sum of two best scores (DeepSeek-V3)."""
    shared_intermediate_size: int = 0
    """Of the experts that see every token, taken together; 0: none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with a plain MLP; all others, also those past the last, have experts."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: grouped-query or latent attention, gated MLPs or experts.

    `num_kv_heads` and `head_dim` are those of the cache, with `mla` 1 and the size of an entry.
    """

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
    lm_head_bias: bool = False
    rope_interleaved: bool = False
    """Rotation pairs the dimensions 0 and 1, 2 and 3, … instead of the two halves."""
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    attention_input_size: int | None = None
    """Width of what attention reads; None: hidden_size, that of what it gives in any case."""

    @property
    def attention_width(self) -> int:
        """Width of what attention reads."""
        return self.attention_input_size or self.hidden_size

    @property
    def context_length(self) -> int:
        """Positions that the model is meant for; dynamic RoPE goes past `max_position`."""
        factor = self.rope.factor if self.rope.rope_type == "dynamic" else 1.0
        return int(self.max_position * factor)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        size = self.mla.qk_rope_head_dim if self.mla is not None else self.head_dim
        return int(size * self.rope.partial_rotary_factor)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that index has experts in the place of one MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def cache_kinds(self) -> tuple[str, ...]:
        """Names of a layer's cache tensors; latent attention reads one as key and as value."""
        return ("key", "value") if self.mla is None else ("key",)
