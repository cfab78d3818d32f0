"""Accept or replace drafted tokens so that the output is exactly the target's (rejection sampling).

Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318).
"""

from collections.abc import Callable
from dataclasses import dataclass

from specexport.runtime.distribution import Distribution
from specexport.runtime.drafters.base import Draft
from specexport.runtime.random import Purpose, uniform


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a step adds: `num_accepted` drafted ones and one from the target."""

    token_ids: tuple[int, ...]
    num_accepted: int


def accept_probability(target: Distribution, draft: Distribution, token_id: int) -> float:
    """`min(1, target / draft)` at a token drawn from `draft`."""
    return min(1.0, target.prob(token_id) / draft.prob(token_id))


def verify(
    draft: Draft,
    target_at: Callable[[int], Distribution],
    seed: int,
    position: int,
) -> Verdict:
    """Walk the draft until a rejection; end with a recovered or a bonus token of the target.

    `target_at(i)` is the target's distribution at the i-th drafted token (and, at i = K, after the
    last); it is asked only as far as the walk goes. `position` is the index in the text of the
    first drafted token.
    """
    accepted: list[int] = []
    for i, (token_id, proposal) in enumerate(zip(draft.token_ids, draft.probs, strict=True)):
        output = _output(target_at(i), proposal, token_id, seed, position + i)
        if output != token_id:
            return Verdict((*accepted, output), len(accepted))
        accepted.append(token_id)
    bonus = _draw(target_at(len(accepted)), seed, position + len(accepted))
    return Verdict((*accepted, bonus), len(accepted))


def _output(
    target: Distribution, proposal: Distribution, token_id: int, seed: int, position: int
) -> int:
    """The token at one position, distributed as `target` when `token_id` is drawn from `proposal`.

    A certain proposal is accepted when the target's own draw hits it: that is rejection sampling
    too (accepted with the target's probability, replaced by a draw from the rest), and the output
    is the very token that plain decoding draws with this seed.
    """
    if proposal.is_one_hot:
        return _draw(target, seed, position)
    chance = uniform(seed, position, Purpose.ACCEPT)
    if chance < accept_probability(target, proposal, token_id):
        return token_id
    return _draw(target.residual(proposal), seed, position)


def _draw(distribution: Distribution, seed: int, position: int) -> int:
    if distribution.is_one_hot:  # no random number is needed
        return int(distribution.token_ids[0])
    return distribution.sample(uniform(seed, position, Purpose.OUTPUT))
