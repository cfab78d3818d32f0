"""Heads that draft step by step, each step from the one before it: EAGLE-3, MTP."""

from abc import abstractmethod
from collections.abc import Iterator

import torch

from specexport.training.draft_layer import DraftLayer, Entries
from specexport.training.drafter import Drafter
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

    def forward(self, batch: Packed) -> Iterator[torch.Tensor]:
        """Logits [C, V_draft] of each step."""
        attention = self.layer.self_attn
        features = self.features(batch.states)
        residual, attended = self.inputs(batch.next_ids, features)
        text, own = attention.entries(attended, batch.positions), list[Entries]()
        residual, attended = residual[batch.first_rows], attended[batch.first_rows]
        positions = batch.positions[batch.first_rows]
        for step in range(batch.num_steps):
            if step > 0:
                positions = positions + 1
                residual, attended = self.inputs(batch.token_ids[step], features)
                own.append(attention.entries(attended, positions))
            x = self.layer(residual, attended, positions, text, own, batch)
            logits, features = self.outputs(x)
            yield logits
