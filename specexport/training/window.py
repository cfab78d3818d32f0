"""Many requests through an engine, few at a time, and their outputs in order."""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

from specexport.runtime.engine import Engine
from specexport.runtime.output import Completion
from specexport.runtime.params import SamplingParams
from specexport.runtime.stream import Stream

_WINDOW = 80
"""Requests submitted and not yet read: enough that others run while the first is waited for."""

Item = TypeVar("Item")
Asked = tuple[Item, Sequence[int], SamplingParams]
"""What is asked for, its prompt and how it is drawn."""


def in_order(
    engine: Engine, requests: Iterable[Asked[Item]]
) -> Generator[tuple[Item, Completion], None, None]:
    """Each item with its output, in the order of `requests`, which is read as outputs are taken.

    What is still open is cancelled when the iterator is closed.
    """
    waiting: deque[tuple[Item, Stream]] = deque()
    try:
        for item, prompt, params in requests:
            waiting.append((item, engine.submit(prompt, params)))
            if len(waiting) == _WINDOW:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    finally:
        for _, stream in waiting:
            stream.cancel()


def _first(waiting: deque[tuple[Item, Stream]]) -> tuple[Item, Completion]:
    item, stream = waiting.popleft()
    with stream:
        return item, stream.result()
