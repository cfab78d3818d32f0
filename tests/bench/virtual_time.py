"""An event loop whose clock jumps to the next timer: nothing waits, every time is exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Where the loop would sleep, the clock moves instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "all tasks wait for each other"
        self.now_s += max(timeout, 0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at second 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def now_s() -> float:
    """The virtual clock."""
    return asyncio.get_running_loop().time()
