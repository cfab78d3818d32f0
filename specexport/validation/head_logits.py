"""Logits of a head's graphs against PyTorch: over texts, and over the steps of a draft.

A correct verifier hides a broken drafter, so its logits are compared like the target's. Both sides
get the target's hidden states from PyTorch and then recycle their own.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.engines.ort import OrtFunction, OrtRunner
from specexport.engines.step import Profile, StepRunner
from specexport.export.manifest import HeadSpec
from specexport.runtime.batch import Batch, Row
from specexport.validation.logits import LogitsMetrics
from specexport.validation.report import HeadReport
from specexport.validation.torch_heads import StepHead, TorchMedusa

NUM_DRAFT_STEPS = 4
_CHUNK = 64


def compare_medusa(
    bundle: Path,
    spec: HeadSpec,
    head: TorchMedusa,
    texts: Iterable[Sequence[int]],
    tolerance: float,
) -> HeadReport:
    """Logits of all heads after each token of all texts."""
    assert spec.medusa is not None
    metrics = LogitsMetrics(tolerance)
    heads = OrtFunction(bundle / spec.medusa.path)
    for text in texts:
        states = head.taps(text)
        for expected, found in zip(head.logits(states), heads.run(states.numpy()), strict=True):
            metrics.add(expected.numpy(), found)
    heads.close()
    return _report(metrics, head, spec, bundle, 0)


def compare_steps(
    bundle: Path, spec: HeadSpec, head: StepHead, texts: Iterable[Sequence[int]], tolerance: float
) -> HeadReport:
    """Logits after each token of all texts, and of a greedy draft below each."""
    assert spec.step is not None
    metrics = LogitsMetrics(tolerance)
    fuse = OrtFunction(bundle / spec.fuse.path) if spec.fuse else None
    length = spec.step.max_length
    profile = Profile(max_slots=1, max_length=length, max_query=_CHUNK)
    with OrtRunner(bundle / spec.step.path, spec.step, profile) as runner:
        for text in texts:
            known = list(text)[: length - NUM_DRAFT_STEPS]
            if len(known) > 1:
                _compare_text(runner, fuse, head, known, metrics)
    if fuse:
        fuse.close()
    return _report(metrics, head, spec, bundle, NUM_DRAFT_STEPS)


def _compare_text(
    runner: StepRunner,
    fuse: OrtFunction | None,
    head: StepHead,
    text: Sequence[int],
    metrics: LogitsMetrics,
) -> None:
    """Row i holds token i + 1 of the text, then of the draft."""
    taps = head.taps(text[:-1])
    states = fuse.run(taps.numpy()) if fuse else taps.numpy()
    tokens, features = list(text[1:]), head.features(taps)
    start = 0
    for _ in range(NUM_DRAFT_STEPS):
        logits, recycled = head.run(tokens, features)
        found, states = _run(runner, tokens, start, states)
        metrics.add(logits[start:].numpy(), found)
        start = len(tokens)
        best = int(logits[-1].argmax())
        tokens.append(best if head.token_map is None else int(head.token_map[best]))
        features = torch.cat([features, recycled[-1:]])
        states = states[-1:]


def _run(
    runner: StepRunner, tokens: Sequence[int], start: int, states: NDArray[np.float32]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits and recycled states of the rows from `start` on, computed in chunks."""
    parts, first = [], start
    while first < len(tokens):
        chunk = list(tokens[first : first + _CHUNK])
        features = states[first - start : first - start + len(chunk)]
        row = Row(first, chunk, len(chunk), hidden_states=features)
        batch = Batch.build([row], runner.profile.max_length, runner.spec.sliding_window)
        output = runner.run(batch.step)
        assert output.hidden_states is not None
        parts.append((output.logits.copy(), output.hidden_states.copy()))
        first += len(chunk)
    logits, recycled = zip(*parts, strict=True)
    return np.concatenate(logits), np.concatenate(recycled)


def _report(
    metrics: LogitsMetrics,
    head: StepHead | TorchMedusa,
    spec: HeadSpec,
    bundle: Path,
    num_steps: int,
) -> HeadReport:
    """The token map is part of the head: it must be the checkpoint's."""
    stored = None if spec.token_map is None else np.load(bundle / spec.token_map)
    if stored is None or head.token_map is None:
        same_ids = stored is head.token_map
    else:
        same_ids = np.array_equal(stored, head.token_map)
    logits = metrics.report()
    return HeadReport(
        **{**logits.model_dump(), "passed": logits.passed and same_ids},
        layout=head.layout,
        num_draft_steps=num_steps,
        same_token_map=same_ids,
    )
