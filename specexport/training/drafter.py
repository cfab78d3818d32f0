"""What the loop trains."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from specexport.errors import ConfigError
from specexport.training.head_files import HeadFiles
from specexport.training.packing import Packed


class Drafter(nn.Module, ABC):
    """A drafting head of any method."""

    @abstractmethod
    def forward(self, batch: Packed) -> Iterator[torch.Tensor]:
        """Logits [C, V_draft] of each of the K steps."""

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin as a head of the same sizes that was written; raises `ConfigError` for another."""
        own = self.state_dict()
        for name, tensor in own.items():
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            if found != tuple(tensor.shape):
                raise ConfigError(
                    f"The head to begin from has {found} for {name}, and this one "
                    f"{tuple(tensor.shape)}. Take one of the same method, target and options."
                )
        self.load_state_dict({name: tensors[name].float() for name in own})

    @abstractmethod
    def files(self) -> HeadFiles:
        """As heads of this kind are published."""
