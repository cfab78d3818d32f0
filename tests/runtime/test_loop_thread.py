"""Many threads, one loop: nothing is lost, nothing doubled, and every request ends."""

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Event, Thread
from typing import Any

import pytest

from specexport.errors import EngineError, QueueFullError
from specexport.runtime.commit import NewTokens
from specexport.runtime.loop import SpeculativeLoop
from specexport.runtime.loop_thread import LoopThread
from specexport.runtime.request import FinishReason, Request
from tests.loop_tools import EOS, Oracle, make_loop, make_request, plain_output
from tests.turnstile import PATIENCE_S, held

SLOTS, WAITING = 4, 5
NUM_THREADS = 8


@dataclass
class Kept:
    """Keeps what comes of a request; more after its end is an error."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    came: Event = field(default_factory=Event)
    ended: Event = field(default_factory=Event)

    def push(self, new: NewTokens) -> None:
        assert new.request is self.request
        assert not self.ended.is_set()
        self.tokens.extend(new.token_ids)
        self.came.set()
        if self.request.finish_reason is not None:
            self.ended.set()

    def reason(self) -> FinishReason | None:
        assert self.ended.wait(PATIENCE_S)
        return self.request.finish_reason


def kept(length: int = 12, seed: int = 0, **params: Any) -> Kept:
    return Kept(make_request([seed % 11, 3, 5], length, seed=seed, **params))


def expected(sink: Kept) -> list[int]:
    request = sink.request
    prompt = request.token_ids[: request.num_prompt]
    return plain_output(prompt, request.params, request.max_tokens)


@contextmanager
def running(max_waiting: int = WAITING) -> Iterator[tuple[LoopThread, SpeculativeLoop]]:
    loop = make_loop(Oracle(wrong_every=3), 4, [EOS])
    thread = LoopThread(loop, SLOTS, max_waiting)
    try:
        yield thread, loop
    finally:
        thread.close()
        assert not thread._thread.is_alive()


def at_once(number: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives in so many threads that begin together."""
    barrier = Barrier(number)

    def begin(index: int) -> Any:
        barrier.wait(PATIENCE_S)
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(begin, range(number)))


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_that_submit_and_cancel_get_each_its_own_output(seed: int) -> None:
    with running(max_waiting=1000) as (thread, _):

        def work(index: int) -> list[tuple[Kept, bool]]:
            rng, done = random.Random(100 * seed + index), []
            for number in range(15):
                sink = kept(rng.randrange(1, 20), 1000 * index + number, temperature=1.0)
                thread.submit([sink])
                if is_cancelled := rng.random() < 0.4:
                    if rng.random() < 0.5:
                        assert sink.came.wait(PATIENCE_S)
                    thread.cancel(sink.request)
                done.append((sink, is_cancelled))
            return done

        everything = [pair for pairs in at_once(NUM_THREADS, work) for pair in pairs]
        for sink, is_cancelled in everything:
            if sink.reason() is FinishReason.CANCELLED:
                assert is_cancelled
                assert sink.tokens == expected(sink)[: len(sink.tokens)]
            else:
                assert sink.tokens == expected(sink)
        stats = thread.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_finished == len(everything) == 15 * NUM_THREADS
    assert stats.num_output_tokens == sum(len(sink.tokens) for sink, _ in everything)


def test_threads_at_once_never_queue_more_than_may_wait() -> None:
    def submit(_: int) -> Kept | None:
        sink = kept()
        try:
            thread.submit([sink])
        except QueueFullError:
            return None
        return sink

    with running() as (thread, loop):
        with held(loop):
            found = at_once(3 * (SLOTS + WAITING), submit)
            assert thread.stats().num_waiting + thread.stats().num_running == SLOTS + WAITING
        queued = [sink for sink in found if sink is not None]
        assert len(queued) == SLOTS + WAITING
        for sink in queued:
            sink.reason()
            assert sink.tokens == expected(sink)


def test_a_full_queue_says_what_waits_and_has_room_again_later() -> None:
    with running() as (thread, loop):
        with held(loop):
            sinks = [kept(seed=i) for i in range(SLOTS + WAITING - 2)]
            thread.submit(sinks)
            with pytest.raises(
                QueueFullError,
                match=r"^3 requests wait \(max_waiting is 5\): there is room for 2 more, not for 3"
                r"\. Submit again when some have finished, or load with a larger max_waiting\.$",
            ):
                thread.submit([kept() for _ in range(3)])
            assert thread.stats().num_waiting == len(sinks)  # none of the three
            thread.submit([kept(), kept()])
            with pytest.raises(QueueFullError, match="room for 0 more, not for 1"):
                thread.check(1)
        for sink in sinks:
            sink.reason()
        last = kept()
        thread.submit([last])
        assert last.reason() is not FinishReason.ERROR


def test_a_request_that_is_cancelled_before_the_loop_has_it_ends_too() -> None:
    with running() as (thread, loop), held(loop) as turnstile:
        first, second = kept(seed=1, ignore_eos=True), kept(seed=2)
        thread.submit([first])
        turnstile.wait()  # the loop is in a step, and does not know the second one
        thread.submit([second])
        thread.cancel(second.request)
        turnstile.let()
        assert second.reason() is FinishReason.CANCELLED
        assert second.tokens == []
        turnstile.open()
        assert first.reason() is FinishReason.LENGTH
        assert first.tokens == expected(first)


def test_statistics_do_not_wait_for_the_step_that_runs() -> None:
    with running() as (thread, loop), held(loop) as turnstile:
        thread.submit([kept(ignore_eos=True) for _ in range(6)])
        turnstile.wait()
        assert (thread.stats().num_running, thread.stats().num_waiting) == (0, 6)
        turnstile.let()
        turnstile.wait()
        stats = thread.stats()
        assert (stats.num_running + stats.num_waiting, stats.num_steps) == (6, 1)
        assert stats.num_running > 0


def test_who_has_read_the_end_finds_it_counted() -> None:
    with running() as (thread, _):
        for number in range(1, 30):
            sink = kept(3)
            thread.submit([sink])
            sink.reason()
            stats = thread.stats()
            assert (stats.num_finished, stats.num_running, stats.num_waiting) == (number, 0, 0)


def test_draining_finishes_what_is_open_and_refuses_the_rest() -> None:
    with running() as (thread, loop):
        with held(loop) as turnstile:
            sinks = [kept(seed=i, ignore_eos=True) for i in range(SLOTS)]
            thread.submit(sinks)
            turnstile.wait()
            sinks.append(kept(seed=9, ignore_eos=True))
            thread.submit(sinks[-1:])  # the loop does not have it yet
            drained = thread.drain()
            with pytest.raises(EngineError, match="engine drains"):
                thread.submit([kept()])
            assert not drained.done()
        drained.result(PATIENCE_S)
        assert all(sink.ended.is_set() for sink in sinks)
        assert [sink.tokens for sink in sinks] == [expected(sink) for sink in sinks]
        assert thread.drain().done()


def test_closing_ends_what_runs_with_what_it_has() -> None:
    with running() as (thread, loop), held(loop) as turnstile:
        sinks = [kept(30, i, ignore_eos=True) for i in range(SLOTS + 2)]
        thread.submit(sinks)
        drained = thread.drain()
        turnstile.let(3)  # a token of each prompt a step
        assert all(sink.came.wait(PATIENCE_S) for sink in sinks[:SLOTS])
        turnstile.before_next(thread.close)  # on the loop's own thread
        assert {sink.reason() for sink in sinks} == {FinishReason.CANCELLED}
        assert drained.done()
    for sink in sinks:
        assert sink.tokens == expected(sink)[: len(sink.tokens)]
    assert [len(sink.tokens) > 0 for sink in sinks] == [True] * SLOTS + [False] * 2


def test_closing_while_others_submit_loses_nothing() -> None:
    with running(max_waiting=100_000) as (thread, _):
        begun = Barrier(NUM_THREADS)

        def work(index: int) -> list[Kept]:
            if index == 0:
                begun.wait(PATIENCE_S)
                thread.close()
                return []
            sinks: list[Kept] = []
            while True:
                sink = kept(4, len(sinks))
                try:
                    thread.submit([sink])
                except EngineError:
                    return sinks
                sinks.append(sink)
                if len(sinks) == 3:
                    begun.wait(PATIENCE_S)

        everything = [sink for sinks in at_once(NUM_THREADS, work) for sink in sinks]
        assert thread.drain().done()
        with pytest.raises(EngineError, match="engine is closed; load the bundle again"):
            thread.submit([kept()])
        assert all(sink.ended.is_set() for sink in everything)  # `close` has returned
        for sink in everything:
            assert sink.tokens == expected(sink)[: len(sink.tokens)]


def test_many_threads_may_close_at_once() -> None:
    with running() as (thread, _):
        sink = kept(30)
        thread.submit([sink])
        at_once(NUM_THREADS, lambda _: thread.close())
        assert sink.ended.is_set()


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The exceptions that threads ended with."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


def test_when_the_loop_breaks_every_open_request_fails_and_new_ones_are_refused(
    unhandled: list[Any],
) -> None:
    with running() as (thread, loop), held(loop) as turnstile:
        sinks = [kept(seed=i) for i in range(SLOTS + 2)]  # those that run, those that wait
        thread.submit(sinks)
        turnstile.wait()
        turnstile.let()
        turnstile.wait()
        sinks.append(kept())
        thread.submit(sinks[-1:])  # the loop does not have it yet
        drained = thread.drain()
        turnstile.before_next(broken)
        assert {sink.reason() for sink in sinks} == {FinishReason.ERROR}
        reason = "The engine broke down (ZeroDivisionError: in a step). Load the bundle again."
        assert {sink.request.error for sink in sinks} == {reason}
        assert drained.done()
        with pytest.raises(EngineError, match=re.escape(reason)):
            thread.submit([kept()])
        assert (thread.stats().num_running, thread.stats().num_waiting) == (0, 0)
        thread.close()
    assert [str(error) for error in unhandled] == ["in a step"]


def broken() -> None:
    raise ZeroDivisionError("in a step")


def test_a_sink_that_raises_leaves_nobody_waiting(unhandled: list[Any]) -> None:
    @dataclass
    class Raising(Kept):
        def push(self, new: NewTokens) -> None:
            if self.request.finish_reason is not FinishReason.ERROR:
                raise MemoryError
            super().push(new)

    with running() as (thread, _):
        sinks = [kept(), Raising(make_request([1], 5)), kept(seed=1)]
        thread.submit(sinks)
        assert sinks[1].reason() is FinishReason.ERROR
        assert sinks[2].reason() is FinishReason.ERROR
        assert sinks[0].ended.is_set()
    assert [type(error) for error in unhandled] == [MemoryError]


def test_a_request_that_the_loop_refuses_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (thread, loop):
        sinks = [kept(seed=i) for i in range(3)]
        submit = loop.submit

        def refuse(request: Request) -> None:
            if request is sinks[1].request:
                raise KeyError("that one")
            submit(request)

        monkeypatch.setattr(loop, "submit", refuse)
        thread.submit(sinks)
        assert sinks[1].reason() is FinishReason.ERROR
        assert sinks[1].request.error == "KeyError: 'that one'"
        for sink in (sinks[0], sinks[2]):
            sink.reason()
            assert sink.tokens == expected(sink)


def test_a_retired_thread_finishes_and_frees_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (thread, loop):
        closed: list[bool] = []
        monkeypatch.setattr(loop, "close", lambda: closed.append(True))
        sinks: Sequence[Kept] = [kept(seed=i, ignore_eos=True) for i in range(2 * SLOTS)]
        with held(loop):
            thread.submit(sinks)
            thread.retire()
            thread.retire()
        thread._thread.join(PATIENCE_S)
        assert not thread._thread.is_alive()
        assert closed == [True]
        assert [sink.tokens for sink in sinks] == [expected(sink) for sink in sinks]
        thread.cancel(sinks[0].request)  # a stream that is left may still say so


def test_a_retired_thread_without_work_ends_at_once() -> None:
    with running() as (thread, _):
        Thread(target=thread.retire).start()
        thread._thread.join(PATIENCE_S)
        assert not thread._thread.is_alive()
