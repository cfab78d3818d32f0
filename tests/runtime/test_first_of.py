"""A lookup first, another drafter for the rest."""

from collections.abc import Sequence

import pytest

from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, NoDrafter, Progress
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request


class Recorder(NoDrafter):
    """Drafts its token as often as it may and keeps what it was told."""

    def __init__(self, token_id: int = 7, engine_time_s: float = 0.0, error: str = "") -> None:
        self._token_id, self._error = token_id, error
        self._engine_time_s = engine_time_s
        self.asked: list[tuple[int, int]] = []
        self.told: list[tuple[object, ...]] = []

    @property
    def engine_time_s(self) -> float:
        return self._engine_time_s

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += [(item.request.id, item.max_tokens) for item in wanted]
        return [Draft.certain([self._token_id] * item.max_tokens) for item in wanted]

    def observe(self, request: Request, progress: Progress) -> None:
        self.told.append(("observe", request.id, progress.path))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.told.append(("move_slot", source, destination, length))

    def release(self, request: Request) -> None:
        self.told.append(("release", request.id))

    def close(self) -> None:
        self.told.append(("close",))
        if self._error:
            raise RuntimeError(self._error)


def request(tokens: list[int], request_id: int) -> Request:
    return Request(request_id, SamplingParams(), 100, len(tokens), tokens)


def test_the_fallback_drafts_only_where_the_lookup_finds_nothing() -> None:
    fallback = Recorder()
    drafter = FirstOf(NgramDrafter(1, 2), fallback)
    wanted = [
        DraftRequest(request([1, 2, 3], 0), 2),
        DraftRequest(request([0, 4, 0], 1), 3),
        DraftRequest(request([0, 5, 0], 2), 0),
        DraftRequest(request([6], 3), 1),
    ]
    drafts = drafter.propose(wanted)
    assert [d.token_ids for d in drafts] == [(7, 7), (4, 0, 4), (), (7,)]
    assert [len(d.probs) for d in drafts] == [2, 3, 0, 1]


def test_the_fallback_sees_every_request_so_that_it_can_keep_in_step() -> None:
    fallback = Recorder()
    FirstOf(NgramDrafter(1, 2), fallback).propose(
        [DraftRequest(request([0, 4, 0], 5), 3), DraftRequest(request([1], 6), 4)]
    )
    assert fallback.asked == [(5, 0), (6, 4)]


def test_both_are_told_everything() -> None:
    lookup, fallback = Recorder(), Recorder()
    drafter: Drafter = FirstOf(lookup, fallback)
    drafter.observe(request([1], 3), Progress((0, 2)))
    drafter.move_slot(2, 1, 30)
    drafter.release(request([1], 4))
    drafter.close()
    told = [("observe", 3, (0, 2)), ("move_slot", 2, 1, 30), ("release", 4), ("close",)]
    assert lookup.told == fallback.told == told


def test_the_time_in_engines_is_of_both() -> None:
    assert FirstOf(Recorder(engine_time_s=1.5), Recorder(engine_time_s=2.0)).engine_time_s == 3.5


def test_the_fallback_is_freed_even_where_freeing_the_lookup_fails() -> None:
    fallback = Recorder()
    with pytest.raises(RuntimeError, match="cannot be freed"):
        FirstOf(Recorder(error="cannot be freed"), fallback).close()
    assert fallback.told == [("close",)]
