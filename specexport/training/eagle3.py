"""An EAGLE-3 head to train (arXiv 2503.01840), and the files that publish it.

One decoder layer in SafeAILab's layout, which SpecForge and most loaders share; the target's
embedding is read and not stored. `export/heads/eagle3.py` has the equations.
"""

from typing import Any

import torch
from torch import nn

from specexport.export.config import DecoderConfig, RopeConfig
from specexport.export.heads.taps import default_taps
from specexport.training.draft_layer import DraftLayer
from specexport.training.head_files import HeadFiles
from specexport.training.head_start import HeadStart
from specexport.training.lender import Lender
from specexport.training.step_drafter import StepDrafter


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
            self.norm.weight.copy_(target.calm_norm())
            self.lm_head.weight.copy_(target.output_matrix[torch.from_numpy(vocabulary.token_map)])

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer."""
        return self.midlayer

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """[N, n * H] → [N, H]; columns of different sizes would be learned at different speeds."""
        found: torch.Tensor = self.fc(states / self.scale)
        return found

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
