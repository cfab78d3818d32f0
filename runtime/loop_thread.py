"""The one thread that drives a loop, and how all others reach it."""

import atexit
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import RLock, Thread, current_thread
from typing import Protocol

from specexport.errors import EngineError, QueueFullError
from specexport.runtime.commit import NewTokens
from specexport.runtime.loop import SpeculativeLoop
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.stats import EngineStats


class Sink(Protocol):
    """Where what comes of one request goes."""

    @property
    def request(self) -> Request:
        """The request."""
        ...

    def push(self, new: NewTokens) -> None:
        """Take what a step gave. Called on the loop's thread: must neither wait nor raise."""
        ...


class LoopThread:
    """Owns a loop, which nobody else may touch. Every method may be called from any thread.

    What is asked for is carried out between two steps, in order; without work the thread sleeps.
    A request is open from `submit` until its sink has its last tokens, and it gets there whatever
    happens: the request ends, is cancelled, the engine is closed, or the loop breaks.
    """

    def __init__(self, loop: SpeculativeLoop, max_slots: int, max_waiting: int) -> None:
        """`max_slots` requests of the loop run at once, `max_waiting` may wait for that."""
        self._loop = loop
        self._max_slots, self._max_waiting = max_slots, max_waiting
        # A signal handler or a finalizer may come in the middle of any method: hence a lock that
        # its own thread may take again, and a queue that takes things in such a place.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = RLock()  # guards the next four
        self._open: dict[int, Sink] = {}
        self._stats = loop.stats()
        self._refusal: str | None = None
        self._idle: Future[None] = Future()  # refusing, and nothing is open
        self._idle.set_running_or_notify_cancel()  # who waits cannot cancel it for others
        self._is_closed = self._is_retired = False
        self._process_id = os.getpid()
        self._thread = Thread(target=self._run, name="specexport", daemon=True)
        self._thread.start()
        _running.add(self)

    def check(self, num_requests: int) -> None:
        """Raise what `submit` would: `EngineError` if it is closed, `QueueFullError` if full."""
        if self._process_id != os.getpid():  # the lock may be held in there, for ever
            raise EngineError(
                "This engine was loaded before the process was forked, and its thread stayed "
                "there. Load the bundle in the process that uses it."
            )
        with self._lock:
            if self._refusal is not None:
                raise EngineError(self._refusal)
            room = self._max_slots + self._max_waiting - len(self._open)
            if num_requests > room:
                raise QueueFullError(
                    f"{max(len(self._open) - self._max_slots, 0)} requests wait (max_waiting is "
                    f"{self._max_waiting}): there is room for {room} more, not for "
                    f"{num_requests}. Submit again when some have finished, or load with a larger "
                    "max_waiting."
                )

    def submit(self, sinks: Sequence[Sink]) -> None:
        """Queue the requests of these sinks, all or none; raises as `check` does."""
        with self._lock:
            self.check(len(sinks))
            self._open.update((sink.request.id, sink) for sink in sinks)
            self._inbox.put(partial(self._admit, [sink.request for sink in sinks]))

    def cancel(self, request: Request) -> None:
        """End a request, after the step that runs; does nothing if it has ended by then."""
        self._inbox.put(partial(self._cancel, request))

    def stats(self) -> EngineStats:
        """Counters after the last step; does not wait for the one that runs."""
        with self._lock:
            num_waiting = len(self._open) - self._stats.num_running
            return replace(self._stats, num_waiting=num_waiting)

    def drain(self) -> Future[None]:
        """Refuse new requests; what comes back is done when nothing is open any more."""
        with self._lock:
            if self._refusal is None:
                self._refuse(
                    "The engine drains: it finishes its requests and takes no new ones. Load the "
                    "bundle again."
                )
        return self._idle

    def close(self) -> None:
        """Cancel what is open, free the engines and end the thread."""
        with self._lock:
            self._refuse("The engine is closed; load the bundle again.")
        self._inbox.put(self._close)
        if current_thread() is not self._thread:
            self._thread.join()

    def retire(self) -> None:
        """End when nothing is open any more: nobody is left who could submit. Never waits."""
        self._inbox.put(self._retire)

    def _run(self) -> None:
        try:
            while self._obey():
                self._deliver(self._loop.step())
        except BaseException as error:
            self._break(error)
            raise  # to threading.excepthook, which prints where it came from
        finally:
            self._loop.close()
            _running.discard(self)

    def _obey(self) -> bool:
        """Carry out what was asked for; sleep without work. False: there is nothing to come."""
        while not self._is_over and not (self._loop.has_work and self._inbox.empty()):
            self._inbox.get()()
        return not self._is_over

    @property
    def _is_over(self) -> bool:
        return self._is_closed or (self._is_retired and not self._loop.has_work)

    def _admit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                self._loop.submit(request)
            except Exception as error:  # one request's trouble is not the others'
                self._deliver([_failed(request, _text(error))])

    def _cancel(self, request: Request) -> None:
        if request.id in self._open:
            self._loop.cancel(request)
            self._deliver([NewTokens(request, ())])

    def _close(self) -> None:
        for sink in list(self._open.values()):
            self._cancel(sink.request)
        self._is_closed = True

    def _retire(self) -> None:
        self._is_retired = True

    def _break(self, error: BaseException) -> None:
        """The loop is in no state to go on: all that is open fails."""
        reason = f"The engine broke down ({_text(error)}). Load the bundle again."
        with self._lock:
            self._refuse(reason)
            requests = [sink.request for sink in self._open.values()]
            self._publish(
                replace(self._stats, num_running=0), [_failed(r, reason) for r in requests]
            )

    def _deliver(self, results: Sequence[NewTokens]) -> None:
        self._publish(self._loop.stats(), results)

    def _publish(self, stats: EngineStats, results: Sequence[NewTokens]) -> None:
        """At once: who has read an output's end finds it counted."""
        with self._lock:
            self._stats = stats
            for new in results:
                self._open[new.request.id].push(new)
                if new.request.finish_reason is not None:
                    del self._open[new.request.id]
            self._note_idle()

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._note_idle()

    def _note_idle(self) -> None:
        if self._refusal is not None and not self._open and not self._idle.done():
            self._idle.set_result(None)


def _failed(request: Request, reason: str) -> NewTokens:
    request.error, request.finish_reason = reason, FinishReason.ERROR
    request.stats.finished_s = time.perf_counter()
    return NewTokens(request, ())


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_running: set[LoopThread] = set()


def _close_all() -> None:
    """A thread inside an inference library must not outlive the interpreter."""
    for thread in tuple(_running):
        thread.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_running.clear)
