"""How many tokens a head's drafts would win on texts that it has not learned from."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from specexport.training.loss import distribution_loss
from specexport.training.packing import Packed


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of greedy drafts as long as the head was trained for, one after each token of the answers."""

    rates: tuple[float, ...]
    """By position: the share of drafts whose token there is the target's likeliest, of those whose
    tokens before it are, and whose text went on with these."""
    length: float
    """Expected tokens of a step, the target's own included."""
    loss: float
    """Of the first position."""
    num_drafts: int


@torch.inference_mode()
def measure_acceptance(
    module: nn.Module, draft_ids: torch.Tensor, batches: Iterable[Packed]
) -> Acceptance:
    """`draft_ids` [V] are -1 for tokens that the head cannot say.

    A draft's later steps read the text, which is what was drafted wherever they still count.
    """
    right: list[float] = []
    tried: list[float] = []
    loss = 0.0
    for batch in batches:
        alive = torch.ones_like(batch.counts[0])
        for step, logits in enumerate(module(batch)):
            if step == len(tried):
                tried.append(0.0)
                right.append(0.0)
            if step == 0:
                ids = draft_ids[batch.top_ids[0]]
                found = distribution_loss(logits, ids, batch.top_probs[0])
                loss += float((found * batch.counts[0]).sum())
            alive = alive * batch.counts[step]
            tried[step] += float(alive.sum())
            greedy = batch.top_ids[step, :, 0]
            alive = alive * (logits.argmax(1) == draft_ids[greedy])
            right[step] += float(alive.sum())
            alive = alive * (batch.label_ids[step] == greedy)
    rates = tuple(r / max(t, 1.0) for r, t in zip(right, tried, strict=True))
    length, all_right = 1.0, 1.0
    for rate in rates:
        all_right *= rate
        length += all_right
    return Acceptance(rates, length, loss / tried[0], int(tried[0]))
