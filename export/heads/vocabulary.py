"""The target's token ids behind the ids that a head with a reduced vocabulary predicts."""

import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError

TokenMap = NDArray[np.int64]
"""[V_draft]: the target's id of each draft id."""


def check_token_map(token_map: TokenMap, target_vocab_size: int, where: str) -> None:
    """Raise `CheckpointError` unless each draft id stands for a token of its own of the target."""
    outside = token_map[(token_map < 0) | (token_map >= target_vocab_size)]
    if len(outside):
        raise CheckpointError(
            f"{where} leads to the token id {outside[0]}; the target has ids 0 to "
            f"{target_vocab_size - 1}. Is the head of this target?"
        )
    if len(np.unique(token_map)) != len(token_map):
        ids, counts = np.unique(token_map, return_counts=True)
        raise CheckpointError(
            f"{where} leads {counts.max()} draft ids to the token id {ids[counts.argmax()]}; each "
            "must stand for another token. Download the head again."
        )


def token_map_from_offsets(d2t: NDArray[np.int64]) -> TokenMap:
    """EAGLE-3's `d2t` holds offsets: the target's id is the draft id plus `d2t[draft id]`."""
    return np.arange(len(d2t), dtype=np.int64) + d2t


def check_mask(token_map: TokenMap, t2d: NDArray[np.int64], where: str) -> None:
    """Raise `CheckpointError` unless `t2d` marks the same tokens of the target."""
    marked = np.flatnonzero(t2d)
    if not np.array_equal(np.sort(token_map), marked):
        differing = np.setxor1d(token_map, marked)
        raise CheckpointError(
            f"{where}: d2t and t2d contradict each other, first at the token id {differing[0]}. "
            "d2t must hold offsets (target id minus draft id). Download the head again."
        )
