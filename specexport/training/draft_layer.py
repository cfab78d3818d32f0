"""One decoder layer that drafts: its queries are steps of chains, not rows of a text.

Step k of a chain that begins at row i stands at position i + k. It sees the rows 0 to i of its
text, computed from the target's states, and the steps 1 to k of its own chain, computed from what
the head gave: what is in the cache when it drafts. So training and drafting compute the same.
"""

from collections.abc import Sequence

import torch
from torch import nn

from specexport.export.config import DecoderConfig
from specexport.export.rope import rotary_tables
from specexport.training.packing import Packed

Entries = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [rows, key-value heads, D]."""

_CALM = 0.1
"""What is left of random output weights where the residual knows something already."""


class DraftLayer(nn.Module):
    """`h = residual + attention(attended)`, then `h + mlp(norm(h))`; Llama's or Qwen's layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = ChainAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMlp(config)

    def forward(
        self,
        residual: torch.Tensor,  # [C, H]
        attended: torch.Tensor,  # [C, width]
        positions: torch.Tensor,  # [C]
        text: Entries,
        own: Sequence[Entries],
        batch: Packed,
    ) -> torch.Tensor:
        """[C, H]; `own` are the entries of the chains' steps from 1 on."""
        h = residual + self.self_attn(attended, positions, text, own, batch)
        found: torch.Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return found


def calm(layer: DraftLayer) -> None:
    """Let a new layer add little to its residual."""
    with torch.no_grad():
        layer.self_attn.o_proj.weight.mul_(_CALM)
        layer.mlp.down_proj.weight.mul_(_CALM)


class GatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, H] → […, H]."""
        gate = nn.functional.silu(self.gate_proj(x))
        found: torch.Tensor = self.down_proj(gate * self.up_proj(x))
        return found


class ChainAttention(nn.Module):
    """Grouped-query attention over a text and a chain."""

    cos: torch.Tensor  # [positions, D / 2]
    sin: torch.Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        width, bias = config.attention_width, config.qkv_bias
        self.q_proj = nn.Linear(width, self._heads * self._head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self._kv_heads * self._head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self._kv_heads * self._head_dim, bias=bias)
        self.o_proj = nn.Linear(
            self._heads * self._head_dim, config.hidden_size, bias=config.output_bias
        )
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self._head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(self._head_dim, config.norm_eps)
        tables = rotary_tables(config.rope, self._head_dim, config.max_position)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def entries(self, attended: torch.Tensor, positions: torch.Tensor) -> Entries:
        """Cache entries of rows."""
        key = self.k_proj(attended).unflatten(-1, (self._kv_heads, self._head_dim))
        value = self.v_proj(attended).unflatten(-1, (self._kv_heads, self._head_dim))
        return self._rotate(self._normed(key, "k_norm"), positions), value

    def forward(
        self,
        attended: torch.Tensor,  # [C, width]
        positions: torch.Tensor,  # [C]
        text: Entries,
        own: Sequence[Entries],
        batch: Packed,
    ) -> torch.Tensor:
        """[C, H]."""
        query = self.q_proj(attended).unflatten(-1, (self._heads, self._head_dim))
        query = self._rotate(self._normed(query, "q_norm"), positions)
        query = query * self._head_dim**-0.5
        query = query.unflatten(1, (self._kv_heads, self._heads // self._kv_heads))  # [C, G, g, D]
        parts = []
        for rows, chains in batch.spans:
            seen = batch.first_rows[chains] - rows.start
            steps = [(key[chains], value[chains]) for key, value in own]
            parts.append(_attend(query[chains], (text[0][rows], text[1][rows]), steps, seen))
        found: torch.Tensor = self.o_proj(torch.cat(parts).flatten(1))
        return found

    def _normed(self, x: torch.Tensor, norm: str) -> torch.Tensor:
        module = getattr(self, norm, None)
        return x if module is None else module(x.float())

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [rows, heads, D]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attend(
    query: torch.Tensor, text: Entries, own: Sequence[Entries], seen: torch.Tensor
) -> torch.Tensor:
    """Chains of one text: query [C, G, g, D] → [C, G, g, D]; `seen` [C] is the last row seen."""
    key, value = text
    hidden = torch.arange(len(key), device=seen.device) > seen[:, None]  # [C, T]
    scores = torch.einsum("cGgd,tGd->cGgt", query, key)
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    steps = [torch.einsum("cGgd,cGd->cGg", query, key)[..., None] for key, _ in own]
    probs = torch.cat([scores, *steps], dim=-1).softmax(dim=-1)
    found = torch.einsum("cGgt,tGd->cGgd", probs[..., : len(key)], value)
    for k, (_, value) in enumerate(own, start=len(key)):
        found = found + probs[..., k : k + 1] * value[:, :, None]
    return found
