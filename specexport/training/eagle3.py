"""An EAGLE-3 head to train (arXiv 2503.01840), and the files that publish it.

One decoder layer in SafeAILab's layout, which SpecForge and most loaders share; the target's
embedding is read and not stored. `export/heads/eagle3.py` has the equations.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from specexport.export.config import DecoderConfig, RopeConfig
from specexport.export.heads.taps import default_taps
from specexport.training.draft_layer import DraftLayer, calm
from specexport.training.head_files import HeadFiles
from specexport.training.head_start import HeadStart
from specexport.training.lender import Lender
from specexport.training.linear_start import LinearGuess, normed
from specexport.training.step_drafter import StepDrafter

_OWN_SCORE = 11.0
"""Of a row's query with its own key: e^11 outweighs some thousand other rows."""


class Eagle3(StepDrafter):
    """Its state dict has the published names."""

    embedding: torch.Tensor  # [V, H]
    scale: torch.Tensor  # [n * H]

    def __init__(self, target: Lender, start: HeadStart) -> None:
        super().__init__()
        taps, vocabulary = start.taps, start.vocabulary
        self._config = _layer_config(target.config, start.max_position)
        self._taps, self._vocabulary, self._target = taps, vocabulary, target.config
        size, eps = target.config.hidden_size, target.config.norm_eps
        self.fc = nn.Linear(len(taps) * size, size, bias=False)
        self.midlayer = Eagle3Layer(self._config)
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, len(vocabulary), bias=False)
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("scale", start.scale)
        with torch.no_grad():  # what the target has learned of tokens
            self.norm.weight.copy_(target.final_norm)
            self.lm_head.weight.copy_(target.output_matrix[torch.from_numpy(vocabulary.token_map)])

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer."""
        return self.midlayer

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """[N, n * H] → [N, H]; columns of different sizes would be learned at different speeds."""
        found: torch.Tensor = self.fc(states / self.scale)
        return found.float()

    def linear_inputs(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Columns of like size, then the normed embedding."""
        return torch.cat([states / self.scale, self._normed_embedding(token_ids)], dim=-1)

    def begin(self, guess: LinearGuess) -> None:
        """`fc` takes the part of the states; one query head that sees itself, the embedding's."""
        width = len(self.scale)
        with torch.no_grad():
            self.fc.weight.copy_(guess.matrix[:width].T)
            self.norm.weight.mul_(guess.fit)
        into, out_of = guess.low_rank(slice(width, None), self._config.head_dim)
        common = self._normed_embedding(torch.from_numpy(self._vocabulary.token_map)).mean(dim=0)
        self.midlayer.map_own_token(into, out_of, common)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tokens that it could not say begin as the target says them."""
        taken = {**tensors, "scale": self.scale}
        if "fc.weight" in taken:
            taken["fc.weight"] = taken["fc.weight"] * self.scale
        if "lm_head.weight" in taken:
            rows = taken["lm_head.weight"].float()
            token_ids = torch.arange(len(rows)) + tensors.get("d2t", torch.tensor(0))
            taken["lm_head.weight"] = self._vocabulary.rows(rows, token_ids, self.lm_head.weight)
        super().take(taken)

    def inputs(
        self, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding goes first."""
        e = self.midlayer.input_layernorm(self.embedding[token_ids])
        return features, torch.cat([e, self.midlayer.hidden_norm(features)], dim=-1)

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step reads is taken before the norm."""
        return self.lm_head(self.norm(x)), x

    def files(self) -> HeadFiles:
        """As SafeAILab's and SpecForge's heads are published."""
        tensors = dict(self.state_dict())
        tensors["fc.weight"] = tensors["fc.weight"] / tensors.pop("scale")
        if not self._vocabulary.is_whole:
            tensors["d2t"] = torch.from_numpy(self._vocabulary.offsets)
            tensors["t2d"] = torch.from_numpy(self._vocabulary.draft_ids >= 0)
        return HeadFiles(tensors, self._published_config())

    def _normed_embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return normed(self.embedding[token_ids], self._config.norm_eps)

    def _published_config(self) -> dict[str, Any]:
        config = self._config
        published = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope.theta,
            "max_position_embeddings": self._target.max_position,
            "vocab_size": self._target.vocab_size,
            "draft_vocab_size": len(self._vocabulary),
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        }
        if self._taps != default_taps(self._target.num_layers):
            # Numbers of layers whose output is read, as SpecForge and ModelOpt count them.
            ids = {"eagle_aux_hidden_state_layer_ids": list(self._taps)}
            published["eagle_config"] = {"use_aux_hidden_state": True, **ids}
        return published


class Eagle3Layer(DraftLayer):
    """Attention reads the embedding and the features, each normed on its own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self._head_dim = config.head_dim

    def map_own_token(self, into: torch.Tensor, out_of: torch.Tensor, common: torch.Tensor) -> None:
        """Add `out_of` [H, r] @ `into` [r, H] @ the row's own normed embedding, and little else.

        r is at most the head size. Query head 0 compares random projections of embeddings, which
        are longest along themselves once their common part, `common` [H], is taken away.
        """
        rank, size = into.shape
        attention, own = self.self_attn, slice(self._head_dim)
        calm(self)
        compare = nn.init.orthogonal_(torch.empty(self._head_dim, size))
        common = common / common.norm()
        compare = compare - torch.outer(compare @ common, common)
        with torch.no_grad():
            for projection, part in (("q_proj", compare), ("k_proj", compare), ("v_proj", into)):
                weight = getattr(attention, projection).weight
                weight[own] = 0.0
                weight[: len(part), :size] = part
            for projection in ("q_proj", "k_proj"):
                getattr(attention, projection).weight[own] *= (
                    _OWN_SCORE**0.5 * self._head_dim**-0.25
                )
            attention.o_proj.weight[:, own] = 0.0
            attention.o_proj.weight[:, :rank] = out_of


def _layer_config(target: DecoderConfig, max_position: int) -> DecoderConfig:
    """A Llama layer of the target's sizes with plain rotation."""
    heads = target.num_heads
    return DecoderConfig(
        family="eagle3",
        architecture="LlamaForCausalLMEagle3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads if target.mla else target.num_kv_heads,
        head_dim=target.mla.v_head_dim if target.mla else target.head_dim,
        norm_eps=target.norm_eps,
        max_position=max_position,
        rope=RopeConfig(theta=target.rope.theta),
        tied_embeddings=False,
        attention_input_size=2 * target.hidden_size,
    )
