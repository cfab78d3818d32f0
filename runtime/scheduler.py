"""Which requests run, and how much of each text a step computes."""

from collections.abc import Sequence
from typing import Protocol

from specexport.runtime.request import Request
from specexport.runtime.request_queue import RequestQueue
from specexport.runtime.scoring import MOST_PROMPT_ROWS
from specexport.runtime.turn import Turn

PATIENCE_S = 10.0
"""A level of priority is worth so many seconds of waiting: nobody is passed for ever."""
_LEAST_CHUNK = 16
"""Tokens that a prompt gets in a step that has no room for it: it must go on as well."""


class Slots(Protocol):
    """What holds the cache entries of the running requests."""

    def fill(self, request: Request) -> None:
        """The request has got its slot: put in what is known of its text."""
        ...

    def is_under_way(self, request: Request, running: Sequence[Request]) -> bool:
        """True where it pays to wait for what one of `running` is about to compute."""
        ...

    def move(self, request: Request, destination: int) -> None:
        """Copy what is computed of the request to another slot."""
        ...

    def keep(self, request: Request) -> None:
        """The request is about to lose its slot before it has ended."""
        ...


class Scheduler:
    """The queue and the running requests; the request in slot b is `running[b]`.

    Those run whose keys are the smallest: the time of submission, less `PATIENCE_S` for each level
    of priority. So equal priorities go first come, first served; one of a higher priority takes
    the slot of the last in this order, which waits for its turn to go on.
    """

    def __init__(self, max_slots: int, step_tokens: int, slots: Slots) -> None:
        """`step_tokens`: query tokens of a step; prompts take what decoding leaves of them."""
        self._max_slots, self._step_tokens = max_slots, step_tokens
        self._slots = slots
        self._waiting = RequestQueue()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.push(_key(request)[0], request)

    def next(self, num_drafted: int = 0) -> list[Turn]:
        """Give out free slots; the turns of this step, by slot.

        `num_drafted`: drafted tokens that the step will have besides, about.
        """
        decoding = sum(r.num_to_compute for r in self.running if not r.is_catching_up)
        budget = self._step_tokens - decoding - num_drafted
        self._admit(budget)
        return self._share(budget)

    def remove(self, request: Request) -> None:
        """Take a request out; the last row moves into its slot."""
        if request.slot < 0:
            self._waiting.remove(request)
            return
        last = self.running.pop()
        if last is not request:
            self._slots.move(last, request.slot)
            self.running[request.slot] = last
            last.slot = request.slot
        request.slot = -1

    def check_integrity(self) -> None:
        """Raise `AssertionError` where slots and requests disagree."""
        assert [request.slot for request in self.running] == list(range(len(self.running)))
        assert len(self.running) <= self._max_slots
        waiting = list(self._waiting)
        assert all(r.slot == -1 and r.finish_reason is None for r in waiting)
        assert all(r.finish_reason is None for r in self.running)
        assert len({r.id for r in (*self.running, *waiting)}) == len(self.running) + len(waiting)

    def _admit(self, budget: int) -> None:
        """A request gets its slot when its first tokens can be computed, not before."""
        while first := self._waiting.first():
            _, request = first
            earlier = [r for r in self.running if _key(r) < _key(request)]
            backlog = sum(r.num_to_compute for r in earlier if r.is_catching_up)
            if backlog >= max(budget, 1) or self._slots.is_under_way(request, earlier):
                break
            if not self._make_room(request):
                break
            self._waiting.remove(request)
            request.slot = len(self.running)
            self.running.append(request)
            self._slots.fill(request)

    def _make_room(self, request: Request) -> bool:
        """True where there is a free slot, if need be that of a request that comes later."""
        if len(self.running) < self._max_slots:
            return True
        last = max(self.running, key=_key)
        if _key(last) < _key(request):
            return False
        self._slots.keep(last)
        self.remove(last)
        last.give_up_slot()
        self.add(last)
        self.num_preemptions += 1
        return True

    def _share(self, budget: int) -> list[Turn]:
        """Texts that are being written go on whole; prompts share the rest, first come first."""
        left = max(budget, min(_LEAST_CHUNK, self._step_tokens))
        turns = []
        for request in sorted(self.running, key=_key):
            size = min(request.num_to_compute, self._most_tokens(request))
            if request.is_catching_up:
                size = min(size, left)
                left -= size
            if size:
                turns.append(Turn(request, size))
        return sorted(turns, key=lambda turn: turn.request.slot)

    def _most_tokens(self, request: Request) -> int:
        """Of one request in one step."""
        scored = request.params.prompt_logprobs and not request.num_output
        return min(self._step_tokens, MOST_PROMPT_ROWS) if scored else self._step_tokens


def _key(request: Request) -> tuple[float, int]:
    return request.stats.submitted_s - PATIENCE_S * request.priority, request.id
