"""What the loop trains."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from specexport.training.head_files import HeadFiles
from specexport.training.packing import Packed


class Drafter(nn.Module, ABC):
    """A drafting head of any method."""

    @abstractmethod
    def forward(self, batch: Packed) -> Iterator[torch.Tensor]:
        """Logits [C, V_draft] of each of the K steps."""

    @abstractmethod
    def files(self) -> HeadFiles:
        """As heads of this kind are published."""
