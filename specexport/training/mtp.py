"""A multi-token-prediction layer to train, for a target that was published without one.

One decoder layer of the target's kind, with the names that Qwen3-Next gave it (`mtp.*`), between
norms and a projection of its own; the target's embedding and output matrix are read, not stored.
`export/heads/mtp_layouts.py` has the equations. It has the target's whole vocabulary, but is
trained on the frequent part of it, which its acceptance is measured with, too.
"""

from dataclasses import replace

import torch
from torch import nn

from specexport.errors import ConfigError
from specexport.export.config import DecoderConfig
from specexport.training.draft_layer import DraftLayer, calm
from specexport.training.head_files import HeadFiles
from specexport.training.head_start import HeadStart
from specexport.training.lender import Lender
from specexport.training.linear_start import LinearGuess, normed
from specexport.training.step_drafter import StepDrafter


class Mtp(StepDrafter):
    """Its state dict has the published names."""

    embedding: torch.Tensor  # [V, H]
    lm_head: torch.Tensor  # [V_draft, H]

    def __init__(self, target: Lender, start: HeadStart) -> None:
        super().__init__()
        self._target = target.config
        _check_layer(target.config)
        self.mtp = MtpModule(replace(target.config, num_layers=1, max_position=start.max_position))
        with torch.no_grad():
            self.mtp.norm.weight.copy_(target.final_norm)
        rows = target.output_matrix[torch.from_numpy(start.vocabulary.token_map)]
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("lm_head", rows, persistent=False)

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer."""
        return self.mtp.layer

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Read as they are."""
        return states

    def linear_inputs(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """What `fc` reads of a new head, whose norms weigh nothing yet."""
        eps = self._target.norm_eps
        return torch.cat([normed(self.embedding[token_ids], eps), normed(states, eps)], dim=-1)

    def begin(self, guess: LinearGuess) -> None:
        """`fc` takes all of it."""
        with torch.no_grad():
            self.mtp.fc.weight.copy_(guess.matrix.T)
            self.mtp.norm.weight.mul_(guess.fit)
        calm(self.mtp.layer)

    def inputs(
        self, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding goes first."""
        e = self.mtp.pre_fc_norm_embedding(self.embedding[token_ids])
        x = self.mtp.fc(torch.cat([e, self.mtp.pre_fc_norm_hidden(features)], dim=-1)).float()
        return x, self.mtp.layer.input_layernorm(x)

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step reads went through the norm, as the target's state did."""
        normed = self.mtp.norm(x)
        return normed @ self.lm_head.T, normed

    def files(self) -> HeadFiles:
        """The tensors that such a checkpoint holds beside the target's."""
        config = {
            "architectures": [self._target.architecture],
            "hidden_size": self._target.hidden_size,
            "vocab_size": self._target.vocab_size,
            "mtp_num_hidden_layers": 1,
        }
        return HeadFiles(dict(self.state_dict()), config)


class MtpModule(nn.Module):
    """What the checkpoint calls `mtp`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList([MtpLayer(config)])
        self.norm = nn.RMSNorm(size, eps)

    @property
    def layer(self) -> "MtpLayer":
        """The one."""
        (found,) = self.layers
        assert isinstance(found, MtpLayer)
        return found


class MtpLayer(DraftLayer):
    """With an input norm, as any layer of the target."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)


def _check_layer(config: DecoderConfig) -> None:
    """Raise `ConfigError` for a target whose layers are not Llama's or Qwen's."""
    is_plain_rope = not config.rope_interleaved and config.rope.partial_rotary_factor == 1.0
    reasons = {
        "latent attention": config.mla is not None,
        "sliding windows": config.sliding_window is not None,
        "a rotation of its own kind": not is_plain_rope,
        "a bias on its output matrix": config.lm_head_bias,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"An MTP layer is of the target's kind, and {config.architecture} has {found[0]}, "
            "which is not trained yet. Take --method eagle3."
        )
