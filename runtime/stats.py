"""Counters of one request and of the whole engine."""

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

RECENT_S = 10.0


@dataclass(slots=True)
class AcceptanceStats:
    """How drafts fared. Position 0 is the first draft token of a step: a tree's first level."""

    num_drafts: int = 0
    num_nodes: int = 0
    """Drafted tokens in all; of a tree, more than one at a position."""
    proposed: list[int] = field(default_factory=list)  # [K] per position
    accepted: list[int] = field(default_factory=list)  # [K] per position

    def record(self, num_proposed: int, num_accepted: int, num_nodes: int) -> None:
        """Count one verified draft of `num_proposed` positions."""
        if num_proposed == 0:
            return
        self.num_drafts += 1
        self.num_nodes += num_nodes
        missing = num_proposed - len(self.proposed)
        self.proposed.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for i in range(num_proposed):
            self.proposed[i] += 1
            self.accepted[i] += i < num_accepted

    def add(self, other: "AcceptanceStats") -> None:
        """Add another's counts."""
        self.num_drafts += other.num_drafts
        self.num_nodes += other.num_nodes
        self.proposed = _add(self.proposed, other.proposed)
        self.accepted = _add(self.accepted, other.accepted)

    @property
    def rate(self) -> float:
        """Accepted tokens / proposed positions; 0 without drafts."""
        return sum(self.accepted) / max(sum(self.proposed), 1)

    @property
    def rate_per_position(self) -> list[float]:
        """Accepted / proposed at each position (a position counts when it was proposed)."""
        return [a / p for a, p in zip(self.accepted, self.proposed, strict=True)]

    @property
    def length(self) -> float:
        """Mean tokens of a step that had a draft: 1 + accepted / drafts."""
        return 1 + sum(self.accepted) / max(self.num_drafts, 1)


def _add(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


@dataclass(slots=True)
class PrefixStats:
    """How often the beginning of a text was known already."""

    num_lookups: int = 0
    num_hits: int = 0
    num_reused_tokens: int = 0
    """Tokens that were not computed again."""
    size_bytes: int = 0
    """Of what is kept now."""

    def record(self, num_tokens: int) -> None:
        """Count a lookup that found so many tokens."""
        self.num_lookups += 1
        self.num_hits += num_tokens > 0
        self.num_reused_tokens += num_tokens

    def now(self, size_bytes: int) -> "PrefixStats":
        """A copy with the size."""
        return PrefixStats(self.num_lookups, self.num_hits, self.num_reused_tokens, size_bytes)


@dataclass(slots=True)
class RequestStats:
    """Times in seconds (`time.perf_counter`), counts in tokens and steps."""

    submitted_s: float = field(default_factory=time.perf_counter)
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    num_first_tokens: int = 0
    """Tokens of the step that gave the first one; a draft may come with it."""
    num_decode_steps: int = 0
    """Target steps after the one that gave the first token."""
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def prefill_time_s(self) -> float:
        """From the start to the first token, waiting in the queue not included."""
        return max(self.first_token_s - self.started_s, 0.0)

    @property
    def decode_time_s(self) -> float:
        """From the first token to the last."""
        return max(self.finished_s - self.first_token_s, 0.0)

    def tokens_per_s(self, num_output: int) -> float:
        """Tokens after the first step, per second of decoding; 0 before the end, or without any."""
        if self.num_decode_steps == 0 or self.decode_time_s == 0:
            return 0.0
        return (num_output - self.num_first_tokens) / self.decode_time_s


class LoopCounters:
    """What a loop counts while it runs."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceStats()
        self.num_finished = 0
        self.draft_time_s = self.verify_time_s = 0.0
        self._num_steps = self._num_output = 0
        self._total_time_s = 0.0
        self._draft_lengths: list[int] = []
        self._num_recent = 0
        self._made_s = time.perf_counter()
        self._recent: deque[tuple[float, int]] = deque()  # (end of a step, its output tokens)

    def record_step(self, started_s: float, num_tokens: int) -> None:
        """Count a step that has just ended."""
        now = time.perf_counter()
        self._num_steps += 1
        self._num_output += num_tokens
        self._total_time_s += now - started_s
        self._recent.append((now, num_tokens))
        self._num_recent += num_tokens
        while self._recent[0][0] <= now - RECENT_S:
            self._num_recent -= self._recent.popleft()[1]

    def record_draft(self, length: int) -> None:
        """Count how long a draft was; 0 where a request had none in a step."""
        self._draft_lengths.extend([0] * (length + 1 - len(self._draft_lengths)))
        self._draft_lengths[length] += 1

    def snapshot(self) -> dict[str, Any]:
        """The fields of `EngineStats` that are counted here."""
        acceptance = AcceptanceStats()
        acceptance.add(self.acceptance)
        window_s = min(RECENT_S, time.perf_counter() - self._made_s)
        return {
            "num_finished": self.num_finished,
            "num_steps": self._num_steps,
            "num_output_tokens": self._num_output,
            "tokens_per_s": self._num_recent / window_s,
            "acceptance": acceptance,
            "draft_lengths": tuple(self._draft_lengths),
            "draft_time_s": self.draft_time_s,
            "verify_time_s": self.verify_time_s,
            "total_time_s": self._total_time_s,
        }


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine since it was loaded."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_preemptions: int
    """How often a request gave up its slot to one of a higher priority."""
    num_steps: int
    num_output_tokens: int
    tokens_per_s: float
    """Output of all requests in the `RECENT_S` seconds before the last step."""
    acceptance: AcceptanceStats
    draft_lengths: tuple[int, ...]
    """How many drafts had each length, from 0 (a step of a request without one) on."""
    draft_time_s: float
    """Proposing drafts; a draft model's steps included."""
    target_time_s: float
    """Inside the inference library, running the target."""
    verify_time_s: float
    """Processing logits, accepting and drawing tokens, and taking them in."""
    total_time_s: float
    """All of `step`."""
    is_lossless: bool
    """False: lossy acceptance was asked for, and outputs are not the target's distribution."""
    engine_time_s: float
    """Inside the inference library, target and draft model."""
    num_cached_tokens: int
    """In the slots of running requests."""
    max_cached_tokens: int
    prefixes: PrefixStats

    @property
    def overhead_time_s(self) -> float:
        """The runtime's own time: everything but the inference library."""
        return self.total_time_s - self.engine_time_s

    @property
    def draft_length(self) -> float:
        """Mean length of the drafts chosen, plain steps included."""
        total = sum(length * number for length, number in enumerate(self.draft_lengths))
        return total / max(sum(self.draft_lengths), 1)
