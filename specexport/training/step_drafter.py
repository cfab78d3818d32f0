"""Heads that draft step by step, each step from the one before it: EAGLE-3, MTP."""

from abc import abstractmethod
from collections.abc import Iterator

import torch

from specexport.training.draft_layer import DraftLayer, Entries
from specexport.training.drafter import Drafter
from specexport.training.linear_start import LinearGuess
from specexport.training.packing import Packed


class StepDrafter(Drafter):
    """Training-time test (EAGLE-3, arXiv 2503.01840): all steps of a draft, unrolled."""

    @property
    @abstractmethod
    def layer(self) -> DraftLayer:
        """The one decoder layer."""

    @abstractmethod
    def features(self, states: torch.Tensor) -> torch.Tensor:
        """What the first step reads of the target's states: [N, W] → [N, H]."""

    @abstractmethod
    def inputs(
        self, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N], [N, H] → the residual [N, H], and what attention reads [N, width]."""

    @abstractmethod
    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[C, H] → logits [C, V_draft], and the features of the next step [C, H]."""

    @abstractmethod
    def linear_inputs(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """What the first step can map linearly: [N, W], [N] → [N, U]."""

    @abstractmethod
    def begin(self, guess: LinearGuess) -> None:
        """Make the first step say what the linear guess of these inputs says, about."""

    def forward(self, batch: Packed) -> Iterator[torch.Tensor]:
        """Logits [C, V_draft] of the first step, and of the others for the batch's long texts."""
        attention = self.layer.self_attn
        features = self.features(batch.states)
        residual, attended = self.inputs(batch.next_ids, features)
        text, own = attention.entries(attended, batch.positions), list[Entries]()
        residual, attended = residual[batch.first_rows], attended[batch.first_rows]
        positions = batch.positions[batch.first_rows]
        for step in range(batch.num_steps):
            if step == 1:
                batch = batch.long()
                features, positions = (x[: len(batch.first_rows)] for x in (features, positions))
            if step > 0:
                positions = positions + 1
                residual, attended = self.inputs(batch.token_ids[step], features)
                own.append(attention.entries(attended, positions))
            x = self.layer(residual, attended, positions, text, own, batch)
            logits, features = self.outputs(x)
            yield logits
