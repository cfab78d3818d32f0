"""Which requests run: first come, first served, into slots that always form a prefix."""

from collections import deque
from collections.abc import Callable

from specexport.runtime.request import Request


class Scheduler:
    """A queue and the running requests; the request in slot b is `running[b]`."""

    def __init__(self, max_slots: int, move_slot: Callable[[int, int, int], None]) -> None:
        """`move_slot(source, destination, length)` moves cache entries between slots."""
        self._max_slots = max_slots
        self._move_slot = move_slot
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def next(self) -> list[Request]:
        """Admit what fits; the requests of this step, by slot."""
        while self.waiting and len(self.running) < self._max_slots:
            request = self.waiting.popleft()
            request.slot = len(self.running)
            self.running.append(request)
        return list(self.running)

    def remove(self, request: Request) -> None:
        """Take a request out; the last row moves into its slot."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        last = self.running.pop()
        if last is not request:
            self._move_slot(last.slot, request.slot, last.num_computed)
            self.running[request.slot] = last
            last.slot = request.slot
        request.slot = -1
