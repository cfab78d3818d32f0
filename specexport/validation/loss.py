"""What quantization costs: the bundle as it runs against PyTorch with unrounded matrices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import StepRunner
from specexport.validation.logits import cached_logits, log_softmax
from specexport.validation.reference import Reference
from specexport.validation.report import LossReport


def measure_loss(
    reference: Reference, runner: StepRunner, texts: Sequence[Sequence[int]]
) -> LossReport:
    """Perplexities over `texts`, and how far the distributions are apart at each position."""
    negative_logs = np.zeros(2)  # PyTorch, the bundle
    sum_kl, num_same, num_positions = 0.0, 0, 0
    for text in texts:
        expected = log_softmax(reference.logits(text))  # [T, V]
        found = log_softmax(cached_logits(runner, text)[:, : expected.shape[1]])
        negative_logs += [_negative_log(expected, text), _negative_log(found, text)]
        sum_kl += float((np.exp(expected) * (expected - found)).sum())
        num_same += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())
        num_positions += len(text)
    num_predicted = max(num_positions - len(texts), 1)  # the first token of a text is given
    checkpoint_perplexity, perplexity = np.exp(negative_logs / num_predicted)
    return LossReport(
        num_positions=num_positions,
        checkpoint_perplexity=float(checkpoint_perplexity),
        perplexity=float(perplexity),
        mean_kl=sum_kl / num_positions,
        top1_agreement=num_same / num_positions,
    )


def _negative_log(log_probs: NDArray[Any], text: Sequence[int]) -> float:
    """Of the text's own tokens, but the first."""
    return -float(log_probs[np.arange(len(text) - 1), list(text[1:])].sum())
