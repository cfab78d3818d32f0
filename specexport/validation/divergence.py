"""How far the bundle as it runs is from a model in PyTorch: perplexities and KL divergence.

What integer weights cost has two parts: the weights are rounded, and ONNX Runtime's kernels round
the activations that they multiply to int8, in blocks of 32. Other types cost the first alone.
Neither can be held to a largest difference of a logit; both are measured here, each against its own
reference.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import StepRunner
from specexport.validation.logits import cached_logits, log_softmax
from specexport.validation.reference import Reference
from specexport.validation.report import DivergenceReport


def measure_divergence(
    reference: Reference, runner: StepRunner, texts: Sequence[Sequence[int]]
) -> DivergenceReport:
    """Over all positions of `texts`, through the cache."""
    negative_logs = np.zeros(2)  # the reference, the bundle
    divergences, num_same = [], 0
    for text in texts:
        expected = log_softmax(reference.logits(text))  # [T, V]
        found = log_softmax(cached_logits(runner, text)[:, : expected.shape[1]])
        negative_logs += [_negative_log(expected, text), _negative_log(found, text)]
        divergences.append((np.exp(expected) * (expected - found)).sum(axis=1))
        num_same += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())
    each = np.concatenate(divergences)
    num_predicted = max(len(each) - len(texts), 1)  # the first token of a text is given
    reference_perplexity, perplexity = np.exp(negative_logs / num_predicted)
    return DivergenceReport(
        num_positions=len(each),
        reference_perplexity=float(reference_perplexity),
        perplexity=float(perplexity),
        mean_kl=float(each.mean()),
        max_kl=float(each.max()),
        top1_agreement=num_same / len(each),
    )


def _negative_log(log_probs: NDArray[Any], text: Sequence[int]) -> float:
    """Of the text's own tokens, but the first."""
    return -float(log_probs[np.arange(len(text) - 1), list(text[1:])].sum())
