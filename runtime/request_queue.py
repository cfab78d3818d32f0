"""Requests in an order, of which some end before their turn."""

import heapq
from collections.abc import Iterator

from specexport.runtime.request import Request

_FEW = 16
"""Removed requests that are not worth looking at all others for."""


class RequestQueue:
    """The smallest key comes first, of equal ones the request that is older.

    A removed request stays in the heap until it comes first, or until half of the heap is such: so
    removing costs next to nothing, and nothing is held on to.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, number, request in self._heap if number in self._ids)

    def push(self, key: float, request: Request) -> None:
        """Put in a request that is not there; if it was before, it left as the first."""
        heapq.heappush(self._heap, (key, request.id, request))
        self._ids.add(request.id)

    def first(self) -> tuple[float, Request] | None:
        """The smallest key and its request; None where nothing is left."""
        if not self._heap:
            return None
        key, _, request = self._heap[0]
        return key, request

    def remove(self, request: Request) -> None:
        """Take a request out; does nothing where it is not there."""
        self._ids.discard(request.id)
        while self._heap and self._heap[0][1] not in self._ids:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._ids) + _FEW:
            self._heap = [item for item in self._heap if item[1] in self._ids]
            heapq.heapify(self._heap)
