"""Medusa: heads that predict the tokens after the next from one hidden state (arXiv 2401.10774)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import FunctionRunner
from specexport.runtime.distribution import Distribution, top_ids
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import DraftRequest, NoDrafter, Progress
from specexport.runtime.growth import Choice, Nodes, StaticTree
from specexport.runtime.request import Request
from specexport.runtime.token_map import TokenMap
from specexport.runtime.tree import ROOT


@dataclass(slots=True)
class _Last:
    """The target's hidden state of the last token but one, at index `position`."""

    position: int
    hidden_state: NDArray[np.float32]  # [H]


class MedusaDrafter(NoDrafter):
    """Fills a static tree: head d gives the candidates of depth d, whatever stands above them.

    The nodes are certain, at any temperature.
    """

    def __init__(
        self, heads: FunctionRunner, tree: StaticTree, token_map: TokenMap | None = None
    ) -> None:
        """`heads` maps hidden states [B, H] to logits [B, heads, V_draft]; None: V_draft is V."""
        self._heads, self._tree, self._token_map = heads, tree, token_map
        self._last: dict[int, _Last] = {}
        self._num_ranks = [
            1 + max(choice[-1] for choice in tree.choices if len(choice) == depth + 1)
            for depth in range(tree.depth)
        ]

    @property
    def is_free(self) -> bool:
        """The heads take time."""
        return False

    @property
    def engine_time_s(self) -> float:
        """Seconds inside the inference library."""
        return self._heads.run_time_s

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """A tree for each request whose text the target has computed up to its last token."""
        ready = [w for w in wanted if w.max_tokens and self._is_ready(w.request)]
        if not ready:
            return [Draft()] * len(wanted)
        states = np.stack([self._last[w.request.id].hidden_state for w in ready])
        logits = self._heads.run(states)
        drafts = {w.request.id: self._draft(rows, w) for w, rows in zip(ready, logits, strict=True)}
        return [drafts.get(w.request.id, Draft()) for w in wanted]

    def observe(self, request: Request, progress: Progress) -> None:
        """Keep the newest hidden state."""
        assert progress.hidden_states is not None
        self._last[request.id] = _Last(request.num_computed - 1, progress.hidden_states[-1])

    def release(self, request: Request) -> None:
        """Forget the request."""
        self._last.pop(request.id, None)

    def close(self) -> None:
        """Free the heads."""
        self._heads.close()

    def _is_ready(self, request: Request) -> bool:
        """The heads follow on the target's own token: the prompt's last may be any."""
        last = self._last.get(request.id)
        is_newest = last is not None and last.position == len(request.token_ids) - 2
        return is_newest and request.num_output > 0

    def _draft(self, logits: NDArray[np.float32], wanted: DraftRequest) -> Draft:  # [heads, V]
        best = [
            top_ids(scores, num_ranks)
            for scores, num_ranks in zip(logits, self._num_ranks, strict=False)
        ]
        nodes = Nodes()
        numbers: dict[Choice, int] = {(): ROOT}
        for choice in self._tree.choices:
            rank, depth = choice[-1], len(choice) - 1
            if depth >= wanted.max_tokens or rank >= wanted.max_width:
                continue
            if choice[:-1] in numbers and rank < len(best[depth]):
                token_id = int(best[depth][rank])
                if self._token_map is not None:
                    token_id = self._token_map.to_target(token_id)
                numbers[choice] = nodes.add(
                    numbers[choice[:-1]], token_id, Distribution.one_hot(token_id)
                )
        return nodes.draft()
