"""Accept or replace drafted tokens so that the output is exactly the target's (rejection sampling).

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318); for several
candidates drawn without replacement, Jeon et al. 2024 (2402.14160) and Yang et al. (2401.06706).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.race import draw
from specexport.runtime.random import Purpose, uniform
from specexport.runtime.tree import ROOT, tree_shape

TargetAt = Callable[[int], Distribution]
"""The target's distribution after a node of the draft, or after the text (`ROOT`)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a step adds: those of the accepted nodes and one from the target."""

    token_ids: tuple[int, ...]
    path: tuple[int, ...]
    """The accepted nodes of the draft, each a child of the one before."""

    @property
    def num_accepted(self) -> int:
        """Accepted drafted tokens."""
        return len(self.path)


def accept_probability(target: Distribution, draft: Distribution, token_id: int) -> float:
    """`min(1, target / draft)` at a token drawn from `draft`."""
    return min(1.0, target.prob(token_id) / draft.prob(token_id))


def verify(draft: Draft, target_at: TargetAt, seed: int, position: int) -> Verdict:
    """Walk down the tree until no child is accepted; end with a token of the target.

    `target_at` is asked for the nodes of the walk alone. `position` is the index in the text of
    the first drafted token.
    """
    children = tree_shape(draft.parents).children
    tokens: list[int] = []
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        candidates = children.get(node, ())
        token_id, accepted = _choose(target_at(node), draft, candidates, seed, position + len(path))
        tokens.append(token_id)
        if accepted is None:
            return Verdict(tuple(tokens), tuple(path))
        path.append(accepted)


def _choose(
    target: Distribution, draft: Draft, candidates: Sequence[int], seed: int, position: int
) -> tuple[int, int | None]:
    """The token at one position, distributed as `target`, and the node that it accepts.

    Candidates are tried in turn, each rejection leaving the residual for the next. Where all of
    them are certain, this is the same as accepting the one that the target's own draw hits, if
    any; so it is done, and the output is the very token that plain decoding draws with this seed.
    """
    if all(draft.probs[node].is_one_hot for node in candidates):
        token_id = draw(target, seed, position)
        hit = (node for node in candidates if draft.token_ids[node] == token_id)
        return token_id, next(hit, None)
    for rank, node in enumerate(candidates):
        proposal, token_id = draft.probs[node], draft.token_ids[node]
        chance = uniform(seed, position, Purpose.ACCEPT, rank)
        if chance < accept_probability(target, proposal, token_id):
            return token_id, node
        target = target.residual(proposal)
    return draw(target, seed, position), None
