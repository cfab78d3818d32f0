"""How far a head's distributions are from the target's."""

import torch
from torch import nn

from specexport.training.drafter import Drafter
from specexport.training.packing import Packed

STEP_DECAY = 0.8
"""Each step of a draft counts so much less: it is reached only where all before it were right."""


def distribution_loss(
    logits: torch.Tensor, draft_ids: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Cross entropy [C] of logits [C, V_draft] with the target's likeliest tokens [C, k].

    `draft_ids` is -1 for tokens that the head cannot say. They are left out without raising the
    others: where the target wants one of them, there is little to learn.
    """
    kept = torch.where(draft_ids >= 0, probs, 0.0)
    log_probs = logits.log_softmax(dim=1, dtype=torch.float32)
    return -(kept * log_probs.gather(1, draft_ids.clamp_min(0))).sum(1)


class Learner(nn.Module):
    """A head and its loss, as one module that can be spread over devices."""

    draft_ids: torch.Tensor  # [V]

    def __init__(self, drafter: Drafter, draft_ids: torch.Tensor) -> None:
        """`draft_ids` [V] are -1 for tokens that the head cannot say."""
        super().__init__()
        self.drafter = drafter
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: Packed) -> torch.Tensor:
        """Mean over the tokens that count, by the weights of their steps."""
        total = weight = batch.counts.new_zeros(())
        for step, logits in enumerate(self.drafter(batch)):
            here = slice(len(logits))  # the chains that come so far
            share = max(len(logits), 1) / max(len(batch.first_rows), 1)
            counts = batch.counts[step, here] * (STEP_DECAY**step / share)
            ids = self.draft_ids[batch.top_ids[step, here]]
            loss = distribution_loss(logits, ids, batch.top_probs[step, here])
            total, weight = total + (loss * counts).sum(), weight + counts.sum()
        return total / weight.clamp_min(1.0)
