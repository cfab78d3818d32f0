"""Texts side by side without padding, and the drafts that a head learns to make of them.

A *chain* is one draft: it begins after token i of a text, and step k predicts token i + k + 2. Step
0 reads the target's states after token i, the steps after it what the head itself gave. As long as
its tokens are right, a draft is what the text says; so all steps read the text's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch

from specexport.training.samples import Sample


@dataclass(frozen=True, slots=True)
class Packed:
    """N rows of some texts, C chains of K steps; row i of a text has token i + 1 and position i."""

    states: torch.Tensor  # [N, W]: the target's, after token i
    next_ids: torch.Tensor  # [N]; nothing reads the last row of a text, which has none
    positions: torch.Tensor  # [N]
    spans: tuple[tuple[slice, slice], ...]
    """By text: its rows and its chains."""
    first_rows: torch.Tensor  # [C]: where a chain begins, among all rows
    token_ids: torch.Tensor  # [K, C]: what a step reads
    label_ids: torch.Tensor  # [K, C]: the text's token that it should predict
    counts: torch.Tensor  # [K, C]: that token is part of an answer
    top_ids: torch.Tensor  # [K, C, k]: the target's likeliest tokens there
    top_probs: torch.Tensor  # [K, C, k]
    num_long: int
    """Of the first so many texts drafts are unrolled to the end, of the others only begun."""

    @property
    def num_steps(self) -> int:
        """K."""
        return len(self.token_ids)

    def long(self) -> Self:
        """The same rows, and the chains of the long texts."""
        spans = self.spans[: self.num_long]
        num_chains = spans[-1][1].stop
        steps = {
            name: getattr(self, name)[:, :num_chains]
            for name in ("token_ids", "label_ids", "counts", "top_ids", "top_probs")
        }
        return replace(self, spans=spans, first_rows=self.first_rows[:num_chains], **steps)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def pack(
    samples: Sequence[Sample], columns: Sequence[int], num_steps: int, long_share: float = 1.0
) -> Packed:
    """`columns` of the states are those that the head reads; at least one text is long."""
    row_starts = [0, *accumulate(len(sample.token_ids) for sample in samples)]
    firsts = [_chain_starts(sample) for sample in samples]
    chain_starts = [0, *accumulate(len(first) for first in firsts)]
    steps = [_steps(s, first, num_steps) for s, first in zip(samples, firsts, strict=True)]
    return Packed(
        states=torch.cat([sample.states[:, list(columns)] for sample in samples]),
        next_ids=torch.cat([sample.token_ids.roll(-1) for sample in samples]),
        positions=torch.cat([torch.arange(len(sample.token_ids)) for sample in samples]),
        spans=tuple(zip(_slices(row_starts), _slices(chain_starts), strict=True)),
        first_rows=torch.cat([f + start for f, start in zip(firsts, row_starts, strict=False)]),
        num_long=max(1, round(long_share * len(samples))),
        **{name: torch.cat([step[name] for step in steps], dim=1) for name in steps[0]},
    )


def _chain_starts(sample: Sample) -> torch.Tensor:
    """Rows [C] whose first step predicts a token of an answer."""
    return sample.is_answer[2:].nonzero()[:, 0]


def _steps(sample: Sample, first: torch.Tensor, num_steps: int) -> dict[str, torch.Tensor]:
    """[K, C, …]; what lies past the end of the text is any token and does not count."""
    labels = first + 2 + torch.arange(num_steps)[:, None]  # [K, C]: places in the text
    inside = labels < len(sample.token_ids)
    labels = labels.clamp_max(len(sample.token_ids) - 1)
    return {
        "token_ids": sample.token_ids[labels - 1],
        "label_ids": sample.token_ids[labels],
        "counts": (sample.is_answer[labels] & inside).float(),
        "top_ids": sample.top_ids[labels - 1],
        "top_probs": sample.top_probs[labels - 1],
    }


def _slices(bounds: Sequence[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(bounds)]
