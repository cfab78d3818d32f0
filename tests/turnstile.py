"""Lets the steps of a loop pass one by one: tests decide what happens between them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Semaphore
from typing import Any

from specexport.runtime.commit import NewTokens
from specexport.runtime.core import Loaded
from specexport.runtime.loop import SpeculativeLoop

PATIENCE_S = 60.0
"""Nothing that a test waits for takes so long, however busy the machine is."""


class Turnstile:
    """Stands before the steps of a loop until they are let through."""

    def __init__(self, loop: SpeculativeLoop) -> None:
        self._step, self._passes, self._arrivals = loop.step, Semaphore(0), Semaphore(0)
        self._is_open = False
        self._before: Callable[[], None] = lambda: None
        loop.step = self._pass  # type: ignore[method-assign]

    def let(self, num_steps: int = 1) -> None:
        """Let so many steps through, one after another."""
        self._passes.release(num_steps)

    def wait(self) -> None:
        """Return when the next step has come: it stands here until it is let through."""
        assert self._arrivals.acquire(timeout=PATIENCE_S)

    def before_next(self, action: Callable[[], None]) -> None:
        """Let a step through that does this first, on the loop's own thread."""
        self._before = action
        self.let()

    def open(self) -> None:
        """Let everything through from now on."""
        self._is_open = True
        self._passes.release()

    def _pass(self) -> list[NewTokens]:
        self._arrivals.release()
        if not self._is_open:
            assert self._passes.acquire(timeout=PATIENCE_S)
        action, self._before = self._before, lambda: None
        action()
        return self._step()


def loop_of(engine: Loaded) -> Any:
    """The loop inside, for a test that looks or changes something while nothing runs."""
    return engine._core.thread._loop


@contextmanager
def held(loop: SpeculativeLoop) -> Iterator[Turnstile]:
    """A turnstile that opens in the end."""
    turnstile = Turnstile(loop)
    try:
        yield turnstile
    finally:
        turnstile.open()
