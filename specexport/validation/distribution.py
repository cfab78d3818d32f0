"""Does speculative sampling draw from the target's distribution? An end-to-end χ² test.

Short outputs are drawn many times with speculation; how often each occurs is compared with its
exact probability, computed by PyTorch along every branch.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from specexport.runtime.engine import Engine
from specexport.runtime.params import SamplingParams
from specexport.validation.reference import Reference
from specexport.validation.report import DistributionReport

FALSE_ALARM_RATE = 1e-4
_TEMPERATURE = 1.5
_TOP_K = 3
_LEAST_EXPECTED = 5.0


def compare_distribution(
    reference: Reference, engine: Engine, prompt: Sequence[int], num_samples: int, length: int = 3
) -> DistributionReport:
    """Draw `num_samples` outputs of `length` tokens from three candidates each."""
    before = engine.stats().acceptance.num_drafts
    streams = [engine.submit(prompt, _params(seed, length)) for seed in range(num_samples)]
    counts = Counter(stream.result().token_ids for stream in streams)
    num_drafts = engine.stats().acceptance.num_drafts - before
    chi2, num_cells = _chi2(counts, _exact(reference, prompt, length), num_samples)
    p_value = _chi2_tail(chi2, num_cells - 1)
    return DistributionReport(
        num_samples=num_samples,
        num_cells=num_cells,
        num_drafts=num_drafts,
        chi2=chi2,
        p_value=p_value,
        false_alarm_rate=FALSE_ALARM_RATE,
        passed=p_value >= FALSE_ALARM_RATE,
    )


def _params(seed: int, length: int) -> SamplingParams:
    return SamplingParams(
        temperature=_TEMPERATURE, top_k=_TOP_K, seed=seed, max_tokens=length, ignore_eos=True
    )


def _exact(
    reference: Reference, prompt: Sequence[int], length: int
) -> dict[tuple[int, ...], float]:
    """Probability of each of the top_k ** length outputs."""
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, probability in outcomes.items():
            logits = torch.from_numpy(reference.logits([*prompt, *tokens])[-1]).double()
            top = torch.topk(logits, _TOP_K)
            probs = torch.softmax(top.values / _TEMPERATURE, dim=0)
            for token_id, p in zip(top.indices.tolist(), probs.tolist(), strict=True):
                longer[(*tokens, token_id)] = probability * p
        outcomes = longer
    return outcomes


def _chi2(
    counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float], num_samples: int
) -> tuple[float, int]:
    """The statistic and its cells; rare outcomes (and impossible ones) share a cell."""
    common = [o for o, p in exact.items() if p * num_samples >= _LEAST_EXPECTED]
    expected = [exact[outcome] * num_samples for outcome in common]
    observed = [counts[outcome] for outcome in common]
    rest = num_samples - sum(expected)
    if rest >= _LEAST_EXPECTED:
        expected.append(rest)
        observed.append(num_samples - sum(observed))
    elif any(outcome not in exact for outcome in counts):
        return float("inf"), len(exact)
    return float(sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))), len(
        expected
    )


def _chi2_tail(chi2: float, degrees: int) -> float:
    """Probability of at least this χ² when the distribution is right."""
    if degrees < 1:
        return 1.0
    values = torch.tensor([degrees / 2, min(chi2, 1e9) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(values[0], values[1]))
