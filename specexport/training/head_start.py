"""What a head is made with, from its training data."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from specexport.export.manifest import Tap
from specexport.training.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class HeadStart:
    """A head before its first step; `scale` and `vocabulary` become part of it."""

    taps: tuple[Tap, ...]
    """The target's states that it reads, in order."""
    vocabulary: DraftVocabulary
    scale: torch.Tensor  # [W]: how large each column of these states is
    max_position: int
    """Positions that training needs."""
    num_draft_steps: int
    is_tied: bool = True
    """Medusa: all heads share the target's output matrix."""


def column_scale(states: Iterable[torch.Tensor]) -> torch.Tensor:
    """How large [W] each column of states [T, W] usually is; none is much below the others.

    A median, since the first token of a text is often hundreds of times as large in some columns.
    """
    scale = torch.cat(list(states)).abs().median(dim=0).values
    return scale.clamp_min(1e-2 * float(scale.median()))
