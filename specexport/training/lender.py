"""What a head in training borrows of its target: sizes, embedding, output matrix, final norm."""

from dataclasses import dataclass

import numpy as np
import torch

from specexport.export.checkpoint import open_checkpoint
from specexport.export.config import DecoderConfig
from specexport.export.decoder import EMBEDDING, LM_HEAD
from specexport.export.families import read_config
from specexport.training.identity import find_checkpoint, identify
from specexport.training.samples import Identity

_FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Lender:
    """The target's frozen tensors, fp32."""

    identity: Identity
    config: DecoderConfig
    embedding: torch.Tensor  # [V, H]
    output_matrix: torch.Tensor  # [V, H]
    final_norm: torch.Tensor  # [H]: its weight


def read_lender(source: str) -> Lender:
    """Of a checkpoint, or of the one that a bundle was built from.

    Raises `CheckpointError` for a checkpoint that `build` would refuse, too.
    """
    checkpoint = open_checkpoint(find_checkpoint(source))
    config = read_config(checkpoint.config)

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensor(name).astype(np.float32))

    embedding = read(EMBEDDING)
    output = embedding if config.tied_embeddings else read(LM_HEAD)
    return Lender(identify(checkpoint), config, embedding, output, read(_FINAL_NORM))
