"""LOSSY acceptance, for those who ask for it: faster, and no longer the target's distribution.

Sources: typical acceptance, Medusa (arXiv 2401.10774, section 2.3.1), after locally typical
sampling (2202.00666); relaxed acceptance as for reasoning models in TensorRT-LLM.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specexport.export.methods import TopAcceptance, TypicalAcceptance
from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.processing import LogitsProcessor
from specexport.runtime.race import draw
from specexport.runtime.tree import ROOT
from specexport.runtime.verify import Verdict

Logits = NDArray[np.float32]  # [V]
LogitsAt = Callable[[int], Logits]
"""The target's logits after a node of the draft, or after the text (`ROOT`)."""


def verify_lossy(
    rule: TypicalAcceptance | TopAcceptance,
    draft: Draft,
    logits_at: LogitsAt,
    processor: LogitsProcessor,
    position: int,
) -> Verdict:
    """Accept the longest path of tokens that the rule lets pass; end with a token of the target.

    What a request rules out never passes. `position` is the index in the text of the first
    drafted token.
    """
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if parent not in paths:
            continue
        logits, above = logits_at(parent), draft.path(parent)
        if isinstance(rule, TypicalAcceptance):
            passes = _is_typical(rule, processor.distribution(logits, above), token_id)
        else:
            passes = _is_near_top(rule, processor.scores(logits, above), token_id)
        if passes:
            paths[node] = (*paths[parent], node)
    path = max(paths.values(), key=len)  # of equally long ones the first
    last = path[-1] if path else ROOT
    target = processor.distribution(logits_at(last), draft.path(last))
    token_id = draw(target, processor.params.seed, position + len(path))
    return Verdict((*(draft.token_ids[node] for node in path), token_id), path)


def _is_typical(rule: TypicalAcceptance, distribution: Distribution, token_id: int) -> bool:
    probs = distribution.probs[distribution.probs > 0]
    entropy = float(-(probs * np.log(probs)).sum())
    return distribution.prob(token_id) > min(rule.epsilon, rule.delta * math.exp(-entropy))


def _is_near_top(rule: TopAcceptance, scores: Logits, token_id: int) -> bool:
    if scores[token_id] == -np.inf:
        return False
    num_better = int((scores > scores[token_id]).sum())
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    gap = (1.0 - weights[token_id]) / weights.sum()
    return num_better < rule.n and bool(gap <= rule.delta)
