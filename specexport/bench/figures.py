"""What one run measured, and the medians of several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Self

import numpy as np

from specexport.bench.clients import Trace
from specexport.bench.load import Run
from specexport.runtime.stats import AcceptanceStats


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of which half, nine tenths and 99 of 100 values are not above; linear between values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where there are no values."""
        return cls(*np.percentile(values, (50, 90, 99)).tolist()) if values else None

    def scaled(self, factor: float) -> "Percentiles":
        """In another unit."""
        return Percentiles(factor * self.p50, factor * self.p90, factor * self.p99)

    @classmethod
    def median(cls, rounds: Sequence["Percentiles | None"]) -> "Percentiles | None":
        """Each percentile's median over the rounds that have values."""
        found = [one for one in rounds if one is not None]
        if not found:
            return None
        return cls(*(median(getattr(one, name) for one in found) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Figures:
    """Speed. Times in seconds."""

    tokens_per_s: float
    """Output tokens of all requests."""
    requests_per_s: float
    first_token_s: Percentiles | None
    """From a request's arrival to its first tokens."""
    inter_token_s: Percentiles | None
    """Of each token after the first chunk: the gap before its chunk / the chunk's tokens."""
    latency_s: Percentiles | None
    """From a request's arrival to its end."""

    @classmethod
    def median(cls, rounds: Sequence["Figures"]) -> "Figures":
        """The median of each figure over the rounds."""
        return cls(
            tokens_per_s=median(one.tokens_per_s for one in rounds),
            requests_per_s=median(one.requests_per_s for one in rounds),
            first_token_s=Percentiles.median([one.first_token_s for one in rounds]),
            inter_token_s=Percentiles.median([one.inter_token_s for one in rounds]),
            latency_s=Percentiles.median([one.latency_s for one in rounds]),
        )


def measure(run: Run) -> Figures:
    """The figures of one run."""
    traces, window_s = run.traces, run.end_s - run.start_s
    num_tokens = sum(
        delivery.num_tokens
        for delivery in run.deliveries
        if run.start_s < delivery.time_s <= run.end_s
    )
    num_finished = sum(run.start_s < time_s <= run.end_s for time_s in run.finishes_s)
    return Figures(
        tokens_per_s=num_tokens / window_s,
        requests_per_s=num_finished / window_s,
        first_token_s=Percentiles.of(
            [trace.deliveries[0].time_s - trace.arrived_s for trace in traces if trace.deliveries]
        ),
        inter_token_s=Percentiles.of([gap for trace in traces for gap in inter_token_s(trace)]),
        latency_s=Percentiles.of([trace.finished_s - trace.arrived_s for trace in traces]),
    )


def inter_token_s(trace: Trace) -> list[float]:
    """One value for each token that came after the first chunk."""
    gaps = []
    for before, delivery in pairwise(trace.deliveries):
        share_s = (delivery.time_s - before.time_s) / delivery.num_tokens
        gaps.extend([share_s] * delivery.num_tokens)
    return gaps


@dataclass(frozen=True, slots=True)
class Drafting:
    """How drafts fared over some requests."""

    num_tokens: int = 0
    """Output tokens."""
    num_steps: int = 0
    """Steps of the target that gave them."""
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> "Drafting":
        """Of what the requests' own counters say."""
        completions = [trace.completion for trace in traces]
        acceptance = AcceptanceStats()
        for completion in completions:
            acceptance.add(completion.stats.acceptance)
        return cls(
            sum(len(completion.token_ids) for completion in completions),
            sum(completion.stats.num_decode_steps + 1 for completion in completions),
            acceptance,
        )

    @classmethod
    def sum(cls, parts: Sequence["Drafting"]) -> "Drafting":
        """All of them together."""
        acceptance = AcceptanceStats()
        for part in parts:
            acceptance.add(part.acceptance)
        num_tokens = sum(part.num_tokens for part in parts)
        return cls(num_tokens, sum(part.num_steps for part in parts), acceptance)

    @property
    def tokens_per_step(self) -> float:
        """Over all steps, with a draft or without."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def mean_draft_length(self) -> float:
        """Positions of a draft; steps without one do not count."""
        return sum(self.acceptance.proposed) / max(self.acceptance.num_drafts, 1)
