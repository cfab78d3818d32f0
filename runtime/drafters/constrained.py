"""Drafts that keep to what a request's output may look like."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specexport.errors import EngineError
from specexport.runtime.constraint import Constraint, Mask
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, Progress
from specexport.runtime.prefix_cache import Piece
from specexport.runtime.request import Request


class Constrained:
    """Cuts the nodes that the constraint forbids, with all below them, from another's drafts.

    For drafters whose nodes are certain (the target's draw settles which one is accepted, so a
    node that it cannot draw makes no difference) and that do not ask which nodes were accepted.
    """

    def __init__(self, drafter: Drafter) -> None:
        """Owns the drafter, and closes it."""
        self._drafter = drafter

    @property
    def is_free(self) -> bool:
        """As the drafter."""
        return self._drafter.is_free

    @property
    def engine_time_s(self) -> float:
        """The drafter's."""
        return self._drafter.engine_time_s

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """The drafter's drafts, cut."""
        drafts = self._drafter.propose(wanted)
        return [
            draft if item.request.constraint is None else cut(draft, item.request.constraint)
            for item, draft in zip(wanted, drafts, strict=True)
        ]

    def observe(self, request: Request, progress: Progress) -> None:
        """Pass it on."""
        self._drafter.observe(request, progress)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Pass it on."""
        self._drafter.move_slot(source, destination, length)

    def release(self, request: Request) -> None:
        """Pass it on."""
        self._drafter.release(request)

    def num_behind(self, request: Request) -> int:
        """The drafter's."""
        return self._drafter.num_behind(request)

    def num_reusable(self, request: Request) -> int:
        """The drafter's."""
        return self._drafter.num_reusable(request)

    def save(self, request: Request, start: int, stop: int) -> NDArray[np.float32] | None:
        """The drafter's."""
        return self._drafter.save(request, start, stop)

    def restore(self, request: Request, pieces: Sequence[Piece], limit: int) -> int:
        """Pass it on."""
        return self._drafter.restore(request, pieces, limit)

    def pause(self, request: Request) -> None:
        """Pass it on."""
        self._drafter.pause(request)

    def close(self) -> None:
        """Free the drafter."""
        self._drafter.close()


def cut(draft: Draft, constraint: Constraint) -> Draft:
    """The nodes whose whole path is allowed."""
    paths = [draft.path(node) for node in range(len(draft))]
    is_kept = [constraint.num_allowed(path) == len(path) for path in paths]
    return draft.kept([node for node, kept in enumerate(is_kept) if kept])


def draftable(constraint: Constraint, path: Sequence[int]) -> Mask | None:
    """What is worth drafting after `path`; None where nothing is, since the output is complete.

    Nor is it where the constraint fails: the request will, once its own distribution is needed.
    """
    try:
        return None if constraint.is_complete(path) else constraint.allowed(path)
    except EngineError:
        return None
