"""Rows of text and drafted trees → the arrays of one step. All index arithmetic lives here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import StepInput
from specexport.runtime.tree import Branches


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens that one slot computes in a step, the first at cache index `start`.

    `num_logits`: logits are wanted for so many of the last tokens.
    """

    start: int
    token_ids: Sequence[int]
    num_logits: int
    branches: Branches | None = None
    """Where the last tokens are nodes of a tree; without it all follow one another."""
    hidden_states: NDArray[np.float32] | None = None  # [q, H]
    """For heads alone."""

    @classmethod
    def idle(cls, max_length: int) -> "Row":
        """A slot that only stands between others: its padding is written past `max_length`."""
        return cls(max_length, (), 0)

    @property
    def end(self) -> int:
        """Valid cache entries of the slot after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step over neighbouring slots and where each row's logits begin."""

    step: StepInput
    logits_start: tuple[int, ...]  # [B]

    @classmethod
    def build(
        cls, rows: Sequence[Row], max_length: int, window: int | None = None, first_slot: int = 0
    ) -> "Batch":
        """Row b is slot `first_slot + b`. `max_length` bounds positions, `window` what they see.

        Shorter rows are padded at their end: padding is written past the valid length, where the
        next step overwrites it before anything may look.
        """
        num_rows, width = len(rows), max(len(row.token_ids) for row in rows)
        input_ids = np.zeros((num_rows, width), dtype=np.int64)  # [B, Q]
        for b, row in enumerate(rows):
            input_ids[b, : len(row.token_ids)] = row.token_ids
        starts = np.array([row.start for row in rows], dtype=np.int64)  # [B]
        positions = starts[:, None] + np.arange(width)  # [B, Q]
        keys = np.arange(max(row.end for row in rows if row.token_ids))  # [T]
        mask = keys <= positions[:, :, None]  # [B, Q, T]
        if window is not None:
            mask &= keys > positions[:, :, None] - window
        for b, row in enumerate(rows):
            if row.branches is not None:
                _branch(row, row.branches, positions[b], mask[b], window)
        indices, logits_start = _logits_indices(rows, width)
        step = StepInput(
            input_ids=input_ids,
            position_ids=np.minimum(positions, max_length - 1),
            write_indices=starts,
            attention_mask=mask[:, None],
            logits_indices=indices,
            hidden_states=_hidden_states(rows, width),
            first_slot=first_slot,
        )
        return cls(step, logits_start)


def _branch(
    row: Row,
    branches: Branches,
    positions: NDArray[np.int64],  # [Q], changed
    mask: NDArray[np.bool_],  # [Q, T], changed
    window: int | None,
) -> None:
    """A node stands at its depth and sees the text before the tree and its own ancestors."""
    num_nodes, num_entries = branches.sees.shape
    base, q = branches.base, slice(len(row.token_ids) - num_nodes, len(row.token_ids))
    node_positions = base + branches.depths[num_entries - num_nodes :]
    positions[q] = node_positions
    visible = np.zeros((num_nodes, mask.shape[1]), dtype=np.bool_)
    visible[:, :base] = True
    visible[:, base : base + num_entries] = branches.sees
    if window is not None:
        oldest = node_positions[:, None] - window
        visible[:, :base] &= np.arange(base) > oldest
        visible[:, base : base + num_entries] &= base + branches.depths > oldest
    mask[q] = visible


def _hidden_states(rows: Sequence[Row], width: int) -> NDArray[np.float32] | None:
    """[B, Q, H], zero where a row has none; None where no row has any."""
    size = next((r.hidden_states.shape[1] for r in rows if r.hidden_states is not None), None)
    if size is None:
        return None
    hidden_states = np.zeros((len(rows), width, size), dtype=np.float32)
    for b, row in enumerate(rows):
        if row.hidden_states is not None:
            hidden_states[b, : len(row.token_ids)] = row.hidden_states
    return hidden_states


def _logits_indices(
    rows: Sequence[Row], width: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], tuple[int, ...]]:
    """Flattened [B * Q] indices of the wanted rows, and where each row's part begins."""
    indices: list[int] = []
    starts: list[int] = []
    for b, row in enumerate(rows):
        starts.append(len(indices))
        end = b * width + len(row.token_ids)
        indices.extend(range(end - row.num_logits, end))
    if not indices:  # a prefill chunk; engines do not like empty tensors
        indices = [next(b for b, row in enumerate(rows) if row.token_ids) * width]
    return np.array(indices, dtype=np.int64), tuple(starts)
