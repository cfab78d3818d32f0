"""Rows of text → the arrays of one step. All index arithmetic lives here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specexport.engines.step import StepInput


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens that one slot computes in a step, the first at position `start`.

    `num_logits`: logits are wanted for so many of the last tokens.
    """

    start: int
    token_ids: Sequence[int]
    num_logits: int

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
    """A step over slots 0..B-1 and where each row's logits begin."""

    step: StepInput
    logits_start: tuple[int, ...]  # [B]

    @classmethod
    def build(cls, rows: Sequence[Row], max_length: int, window: int | None = None) -> "Batch":
        """Row b belongs to slot b. `max_length` bounds positions, `window` is a sliding window.

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
        indices, logits_start = _logits_indices(rows, width)
        step = StepInput(
            input_ids=input_ids,
            position_ids=np.minimum(positions, max_length - 1),
            write_indices=starts,
            attention_mask=mask[:, None],
            logits_indices=indices,
        )
        return cls(step, logits_start)


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
