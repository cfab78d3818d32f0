"""The target's hidden states and likeliest tokens at every position of given sequences."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile, StepRunner
from specexport.errors import CheckpointError
from specexport.export.manifest import Tap
from specexport.export.parts import ModelSource, Sizes
from specexport.runtime.batch import Batch, Row
from specexport.training.disk import scratch, told_when_full

_MAX_ROWS = 16
_MOST_LOGITS = 2**25
"""Of one batch: 128 MiB."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target says of one sequence."""

    states: torch.Tensor  # [T, n * H] float32
    top_ids: torch.Tensor  # [T, k] int32, likeliest first
    top_probs: torch.Tensor  # [T, k] float32


class Teacher:
    """A graph of the target that gives the taps."""

    max_rows = _MAX_ROWS

    def __init__(self, runner: StepRunner) -> None:
        """`runner` has `max_rows` slots, and takes whole sequences in one step."""
        self._runner = runner

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch, so that its logits are not too large."""
        return max(_MOST_LOGITS // self._runner.spec.vocab_size, 1)

    def explain(self, texts: Sequence[Sequence[int]], top_k: int) -> Iterator[Lesson]:
        """Run up to `max_rows` sequences side by side: one lesson for each."""
        rows = [Row(0, token_ids, len(token_ids)) for token_ids in texts]
        spec, max_length = self._runner.spec, self._runner.profile.max_length
        batch = Batch.build(rows, max_length, spec.sliding_window)
        output = self._runner.run(batch.step)
        logits = torch.from_numpy(output.logits)  # [N, V]
        top, ids = torch.topk(logits, top_k, dim=-1)
        probs = torch.exp(top - torch.logsumexp(logits, dim=-1, keepdim=True))
        states = output.hidden_states  # [B, Q, n * H]; None where there are no taps
        if states is None:
            states = np.empty((*batch.step.input_ids.shape, 0), dtype=np.float32)
        for row, (token_ids, start) in enumerate(zip(texts, batch.logits_start, strict=True)):
            here = slice(start, start + len(token_ids))
            own = torch.from_numpy(states[row, : len(token_ids)].copy())
            yield Lesson(own, ids[here].int(), probs[here])


@contextmanager
def open_teacher(
    source: ModelSource, taps: tuple[Tap, ...], profile: Profile, folder: Path
) -> Iterator[Teacher]:
    """Export the target with `taps` into a folder inside `folder` that is gone afterwards.

    Raises `CheckpointError` for a layer that the target does not have.
    """
    num_layers = source.config.num_layers
    if bad := [tap for tap in taps if isinstance(tap, int) and not -1 <= tap < num_layers]:
        raise CheckpointError(
            f"Hidden states after layers {bad} are wanted; the target has layers 0 to "
            f"{num_layers - 1}."
        )
    part = source.plan(Sizes(max_length=profile.max_length), taps)
    with scratch(folder / ".graph") as graph:
        with told_when_full(graph):
            graph.mkdir()
            part.write(graph, lambda what, done, total: None)
        spec = part.spec()
        with OrtRunner(graph / spec.path, spec, profile) as runner:
            yield Teacher(runner)


def teacher_profile(max_length: int, num_threads: int) -> Profile:
    """Whole sequences of up to `max_length` tokens, some side by side."""
    return Profile(
        max_slots=_MAX_ROWS, max_length=max_length, max_query=max_length, num_threads=num_threads
    )
