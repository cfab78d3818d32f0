"""Logits of a graph against the reference, with Polygraphy's runners and comparator."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from specexport.engines.step import StepRunner
from specexport.runtime.batch import Batch, Row
from specexport.validation.reference import Reference
from specexport.validation.report import LogitsReport

# Query lengths that the cached passes go through: single tokens, drafts and chunks, mixed.
_CHUNKS = (5, 1, 17, 2, 64, 8, 1, 33)


class ReferenceRunner(BaseRunner):  # type: ignore[misc] # polygraphy has no types
    """PyTorch, the whole text in one pass without a cache."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(name="PyTorch")
        self._reference = reference

    def get_input_metadata_impl(self) -> TensorMetadata:
        """The only input is the text."""
        return _METADATA

    def infer_impl(self, feed_dict: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
        """Logits [T, V]."""
        return _timed(self, self._reference.logits, feed_dict)


class CachedRunner(BaseRunner):  # type: ignore[misc] # polygraphy has no types
    """A bundle's graph, the same text in pieces of many lengths through its cache."""

    def __init__(self, runner: StepRunner) -> None:
        super().__init__(name=runner.spec.path)
        self._runner = runner

    def get_input_metadata_impl(self) -> TensorMetadata:
        """The only input is the text."""
        return _METADATA

    def infer_impl(self, feed_dict: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
        """Logits [T, V]."""
        return _timed(self, lambda ids: cached_logits(self._runner, ids), feed_dict)


def cached_logits(runner: StepRunner, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Teacher-forced logits [T, V], computed chunk by chunk in slot 0."""
    parts, start, turn = [], 0, 0
    while start < len(token_ids):
        tokens = token_ids[
            start : start + min(_CHUNKS[turn % len(_CHUNKS)], runner.profile.max_query)
        ]
        row = Row(start, list(tokens), len(tokens))
        batch = Batch.build([row], runner.profile.max_length, runner.spec.sliding_window)
        parts.append(runner.run(batch.step).logits.copy())
        start, turn = start + len(tokens), turn + 1
    return np.concatenate(parts)


class LogitsMetrics:
    """Worst and mean figures over all texts; a comparison of Polygraphy's."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.num_positions = self.num_same_top1 = 0
        self.max_abs_diff = self.max_kl = self.sum_abs_diff = 0.0
        self.is_finite = True

    def __call__(self, reference: Any, bundle: Any) -> "OrderedDict[str, bool]":  # noqa: ANN401
        """Compare two iteration results; polygraphy calls this."""
        is_close = self.add(reference["logits"], bundle["logits"])
        return OrderedDict(logits=is_close)

    def add(self, expected: NDArray[Any], found: NDArray[Any]) -> bool:  # [T, V]
        """Take in logits of one text; true where none differs by more than the tolerance."""
        found = found[:, : expected.shape[1]]
        difference = np.abs(expected - found)
        self.is_finite &= bool(np.isfinite(found).all())
        self.max_abs_diff = max(self.max_abs_diff, float(difference.max()))
        self.sum_abs_diff += float(difference.mean(axis=1).sum())
        self.max_kl = max(self.max_kl, float(_kl(expected, found).max()))
        self.num_positions += len(expected)
        self.num_same_top1 += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())
        return bool(difference.max() <= self._tolerance)

    def report(self) -> LogitsReport:
        """Figures and verdict."""
        return LogitsReport(
            num_positions=self.num_positions,
            max_abs_diff=self.max_abs_diff,
            mean_abs_diff=self.sum_abs_diff / self.num_positions,
            tolerance=self._tolerance,
            top1_agreement=self.num_same_top1 / self.num_positions,
            max_kl=self.max_kl,
            passed=self.is_finite and self.max_abs_diff <= self._tolerance,
        )


def compare_logits(
    reference: Reference, runner: StepRunner, texts: Iterable[Sequence[int]], tolerance: float
) -> LogitsReport:
    """Compare `runner` with `reference` at every position of all texts."""
    metrics = LogitsMetrics(tolerance)
    feeds = [{"input_ids": np.array(text, dtype=np.int64)} for text in texts]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runners = [ReferenceRunner(reference), CachedRunner(runner)]
        stream = Comparator.run(runners, data_loader=feeds, streaming=True)
        Comparator.compare_accuracy(stream, compare_func=metrics)
    return metrics.report()


_METADATA = TensorMetadata().add("input_ids", dtype=np.int64, shape=(-1,))


def _timed(runner: Any, function: Any, feed_dict: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    started = time.perf_counter()
    logits = function([int(i) for i in feed_dict["input_ids"]])
    runner.inference_time = time.perf_counter() - started
    return {"logits": logits}


def _kl(expected: NDArray[Any], found: NDArray[Any]) -> NDArray[np.float64]:  # [T, V]² -> [T]
    log_p, log_q = log_softmax(expected), log_softmax(found)
    return np.asarray((np.exp(log_p) * (log_p - log_q)).sum(axis=1))


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:  # [T, V]
    """Logarithms of the probabilities, in fp64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
