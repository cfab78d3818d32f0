"""The target's token ids behind the ids that a head with a vocabulary of its own predicts."""

import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.heads.head_checkpoint import HeadCheckpoint

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


def read_token_map(
    head: HeadCheckpoint, maps: dict[str, str], num_outputs: int, target_vocab_size: int
) -> TokenMap | None:
    """From EAGLE-3's `d2t`, checked against `t2d`; None where draft ids are the target's.

    `d2t` holds offsets: the target's id is the draft id plus `d2t[draft id]`. `maps` gives the
    names of the two in the file.
    """
    if "d2t" not in maps:
        if num_outputs != target_vocab_size:
            raise CheckpointError(
                f"{head.source} predicts {num_outputs} tokens of the target's {target_vocab_size}, "
                "but lacks the tensor 'd2t', which says which. Is the file complete?"
            )
        return None
    d2t = head.indices(maps["d2t"])
    if len(d2t) != num_outputs:
        raise CheckpointError(
            f"{head.source}: d2t has {len(d2t)} entries, the output matrix {num_outputs} rows. "
            "Download it again."
        )
    token_map = np.arange(len(d2t), dtype=np.int64) + d2t
    check_token_map(token_map, target_vocab_size, f"{head.source}: d2t")
    if "t2d" in maps:
        _check_mask(token_map, head.indices(maps["t2d"]), head.source)
    is_identity = num_outputs == target_vocab_size and not d2t.any()
    return None if is_identity else token_map


def _check_mask(token_map: TokenMap, t2d: NDArray[np.int64], where: str) -> None:
    """`t2d` must mark the same tokens of the target."""
    marked = np.flatnonzero(t2d)
    if not np.array_equal(np.sort(token_map), marked):
        differing = np.setxor1d(token_map, marked)
        raise CheckpointError(
            f"{where}: d2t and t2d contradict each other, first at the token id {differing[0]}. "
            "d2t must hold offsets (target id minus draft id). Download the head again."
        )
