"""Running estimates of how many drafted tokens are accepted, of all requests and of each one."""

from dataclasses import dataclass, field

from specexport.runtime.lengths import Outcome

_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 2.0
_FADE = 1 - 1 / 24
"""Of what is known, with each draft: about so many are remembered."""
_FADE_UNTRIED = 1 - 1 / 96
"""Of positions that drafts do not reach any more, so that they are tried again."""


@dataclass(slots=True)
class _Rates:
    """P(token i is accepted | those before it were), by position; old drafts fade.

    What is not known of a position is taken from the one before it.
    """

    proposed: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def record(self, num_proposed: int, num_accepted: int) -> None:
        tried = min(num_accepted + 1, num_proposed)  # what follows a rejection was not tried
        missing = tried - len(self.proposed)
        self.proposed.extend([0.0] * missing)
        self.accepted.extend([0.0] * missing)
        for i in range(len(self.proposed)):
            fade = _FADE if i < tried else _FADE_UNTRIED
            self.proposed[i] = self.proposed[i] * fade + (i < tried)
            self.accepted[i] = self.accepted[i] * fade + (i < num_accepted)

    def rate(self, i: int, prior: float) -> float:
        if i >= len(self.proposed):
            return prior
        return (self.accepted[i] + _PRIOR_WEIGHT * prior) / (self.proposed[i] + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Own:
    """Of one request: its rates, and the tokens that a step is expected to give."""

    rates: _Rates
    expected: list[float]


class AcceptanceEstimate:
    """Of drafts of one width. A request that is not known yet is expected to do as all do."""

    def __init__(self, max_depth: int) -> None:
        """Drafts are `max_depth` deep at the most."""
        self._max_depth = max_depth
        self._all = _Rates()
        self._expected = self._sum(_Rates())
        self._own: dict[int, _Own] = {}

    def record(self, request_id: int, num_proposed: int, num_accepted: int) -> None:
        """Take in a draft, for its request and for all."""
        self._all.record(num_proposed, num_accepted)
        self._expected = self._sum(_Rates())
        own = self._own.setdefault(request_id, _Own(_Rates(), []))
        own.rates.record(num_proposed, num_accepted)
        own.expected = self._sum(own.rates)

    def expected(self, request_id: int) -> list[float]:
        """Tokens of a step with a draft of each depth, from 0 on, the target's own included."""
        own = self._own.get(request_id)
        return self._expected if own is None else own.expected

    def release(self, request_id: int) -> None:
        """Forget the request; what it taught about all stays."""
        self._own.pop(request_id, None)

    def _sum(self, own: _Rates) -> list[float]:
        total, reached, prior = [1.0], 1.0, _PRIOR_RATE
        for i in range(self._max_depth):
            prior = self._all.rate(i, prior)
            reached *= own.rate(i, prior)
            total.append(total[-1] + reached)
        return total


class Acceptance:
    """Of chains, and of trees where there are any: every tree tells of the chain in it."""

    def __init__(self, max_depth: int) -> None:
        """Drafts are `max_depth` deep at the most."""
        self.chains, self.trees = AcceptanceEstimate(max_depth), AcceptanceEstimate(max_depth)

    def record(self, request_id: int, outcome: Outcome) -> None:
        """Take in how a draft fared."""
        if not outcome.depth:
            return
        first = outcome.num_accepted if outcome.num_first is None else outcome.num_first
        self.chains.record(request_id, outcome.depth, first)
        if outcome.is_tree:
            self.trees.record(request_id, outcome.depth, outcome.num_accepted)

    def expected(self, request_id: int, width: int) -> list[float]:
        """Tokens of a step with a draft of each depth, the target's own included."""
        chains = self.chains.expected(request_id)
        if width == 1:
            return chains
        return [max(both) for both in zip(chains, self.trees.expected(request_id), strict=True)]

    def release(self, request_id: int) -> None:
        """Forget the request."""
        self.chains.release(request_id)
        self.trees.release(request_id)
