"""Streams that threads read: waiting, timing out, leaving early, several at once."""

import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from specexport import Choice, Completion, Engine, EngineOptions, FinishReason, SamplingParams
from specexport.errors import EngineError, QueueFullError, RequestError
from tests.turnstile import PATIENCE_S, held, loop_of

PROMPT = "to be or not to be, to be or"
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
TWO = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=1, n=2)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    options = EngineOptions(max_slots=3, max_waiting=4, num_threads=1)
    with Engine(tiny_bundle, options) as engine:
        yield engine


def test_threads_that_share_an_engine_get_what_each_gets_alone(tiny_bundle: Path) -> None:
    """Texts, sampled ones and grammars, from eight threads at once."""

    def params(i: int) -> SamplingParams:
        structure = Choice((f"be {i % 3}", "not to be")) if i % 3 == 0 else None
        return SamplingParams(max_tokens=15, temperature=0.8 * (i % 2), seed=i, structure=structure)

    def run(i: int) -> tuple[str, tuple[int, ...]]:
        stream = shared.submit(PROMPT * (1 + i % 3), params(i))
        text = "".join(chunk.text for chunk in stream)
        result = stream.result()
        assert result.text == text
        return text, result.token_ids

    with Engine(tiny_bundle, EngineOptions(max_slots=3, num_threads=1)) as shared:
        alone = [run(i) for i in range(24)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(run, range(24))) == alone


def test_a_result_that_does_not_come_in_time_is_a_timeout_and_the_request_goes_on(
    engine: Engine,
) -> None:
    with held(loop_of(engine)) as turnstile:
        stream, group = engine.submit(PROMPT, LONG), engine.submit_many(PROMPT, TWO)
        turnstile.wait()
        for wait in (stream.result, group.results):
            with pytest.raises(TimeoutError, match=r"Not finished after 0 s\. The request goes on"):
                wait(0)
        assert not stream.is_finished
        assert not group.is_finished
        assert stream.take() == []
    assert len(stream.result(PATIENCE_S).token_ids) == 60
    assert [len(result.token_ids) for result in group.results(PATIENCE_S)] == [8, 8]
    assert stream.is_finished
    assert group.is_finished


def test_a_result_leaves_the_chunks_to_be_read(engine: Engine) -> None:
    stream = engine.submit(PROMPT, LONG)
    text = stream.result().text
    taken = stream.take()
    assert "".join(chunk.text for chunk in taken) == text
    assert stream.take() == list(stream) == []


def test_a_stream_that_is_left_early_is_cancelled(engine: Engine) -> None:
    with held(loop_of(engine)) as turnstile:
        turnstile.let()
        with engine.submit(PROMPT, LONG) as stream, engine.submit_many(PROMPT, TWO) as group:
            next(iter(stream))
    results = [stream.result(), *group.results()]
    assert {result.finish_reason for result in results} == {FinishReason.CANCELLED}


def test_a_finished_stream_may_be_left_and_cancelled_without_effect(engine: Engine) -> None:
    with engine.submit(PROMPT, LONG) as stream:
        stream.result()
    stream.cancel()
    assert stream.result().finish_reason is FinishReason.LENGTH
    assert engine.stats().num_running == 0


def test_the_outputs_of_a_group_come_interleaved(engine: Engine) -> None:
    group = engine.submit_many(PROMPT, TWO)
    alone = [engine.submit(PROMPT, choice).result() for choice in TWO.choices()]
    with held(loop_of(engine)) as turnstile:
        again = engine.submit_many(PROMPT, TWO)
        turnstile.let()
        chunks = iter(again)
        assert [next(chunks)[0], next(chunks)[0]] == [0, 1]
        turnstile.open()
        assert {index for index, _ in chunks} == {0, 1}
    texts = ["", ""]
    for index, chunk in group:
        texts[index] += chunk.text
    assert texts == [result.text for result in alone] == [r.text for r in again.results()]


def test_the_statistics_of_a_stream_are_those_of_its_last_chunk(engine: Engine) -> None:
    with held(loop_of(engine)) as turnstile:
        stream = engine.submit(PROMPT, LONG)
        assert stream.stats.first_token_s == 0
        turnstile.let(2)
        chunks = iter(stream)
        next(chunks), next(chunks)
        turnstile.wait()
        turnstile.wait()
        assert stream.stats.num_decode_steps == 1
    assert stream.result().stats.num_decode_steps > 1


def test_priority_and_timeout_reach_the_request(engine: Engine) -> None:
    before = time.perf_counter()
    with engine.submit(PROMPT, LONG, priority=-7, timeout_s=3600) as stream:
        deadline_s = stream.request.deadline_s
        assert deadline_s is not None
        assert before + 3600 <= deadline_s <= time.perf_counter() + 3600
        assert stream.request.priority == -7
    with engine.submit_many(PROMPT, TWO, priority=100) as group:
        assert [stream.request.priority for stream in group.streams] == [100, 100]
        assert group.streams[0].request.deadline_s is None
    with engine.submit_chat([{"role": "user", "content": "hi"}], LONG, priority=1) as chat:
        assert chat.request.priority == 1
    for left in (stream, *group.streams, chat):
        left.result()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"priority": 101}, r"^priority is 101; it must be a whole number from -100 to 100\."),
        ({"priority": 0.5}, r"^priority is 0\.5; it must be a whole number"),
        ({"priority": True}, "^priority is True"),
        ({"priority": None}, "^priority is None"),
        ({"timeout_s": 0}, r"^timeout_s is 0; it must be a number of seconds above 0, or None\.$"),
        ({"timeout_s": -1.5}, r"^timeout_s is -1\.5"),
        ({"timeout_s": float("inf")}, "^timeout_s is inf"),
        ({"timeout_s": float("nan")}, "^timeout_s is nan"),
        ({"timeout_s": "3"}, "^timeout_s is '3'"),
        ({"timeout_s": True}, "^timeout_s is True"),
    ],
)
def test_a_bad_priority_or_timeout_is_refused(
    engine: Engine, values: dict[str, Any], message: str
) -> None:
    with held(loop_of(engine)):
        others = engine.submit_many(PROMPT, TWO)
        with pytest.raises(RequestError, match=message):
            engine.submit(PROMPT, LONG, **values)
        assert engine.stats().num_waiting == 2
    others.results()


def test_a_full_queue_refuses_all_of_several_outputs_before_it_reads_the_prompt(
    engine: Engine,
) -> None:
    three = SamplingParams(temperature=1.0, n=3, max_tokens=5)
    with held(loop_of(engine)):
        streams = [engine.submit(PROMPT, LONG) for _ in range(5)]
        with pytest.raises(QueueFullError, match=r"2 requests wait .* room for 2 more, not for 3"):
            engine.submit_many("", three)
        assert engine.stats().num_waiting == 5
        with pytest.raises(RequestError, match="The prompt is empty"):
            engine.submit("")
    for stream in streams:
        stream.result()
    assert len(engine.submit_many(PROMPT, three).results()) == 3


def test_draining_waits_as_long_as_it_is_told(tiny_bundle: Path) -> None:
    with Engine(tiny_bundle, EngineOptions(num_threads=1)) as engine:
        with held(loop_of(engine)):
            streams = [engine.submit(PROMPT, LONG) for _ in range(3)]
            assert not engine.drain(timeout_s=0)
            with pytest.raises(EngineError, match="engine drains"):
                engine.submit(PROMPT)
        assert engine.drain(PATIENCE_S)
        assert engine.drain()
        assert all(stream.is_finished for stream in streams)
    assert {stream.result().finish_reason for stream in streams} == {FinishReason.LENGTH}


def test_closing_wakes_those_who_wait(tiny_bundle: Path) -> None:
    found: list[Completion] = []
    with (
        Engine(tiny_bundle, EngineOptions(num_threads=1)) as engine,
        held(loop_of(engine)) as turnstile,
    ):
        stream = engine.submit(PROMPT, LONG)
        reader = Thread(target=lambda: found.append(stream.result()))
        reader.start()
        turnstile.wait()
        turnstile.before_next(engine.close)
        reader.join(PATIENCE_S)
    assert [result.finish_reason for result in found] == [FinishReason.CANCELLED]


def test_a_forgotten_engine_finishes_what_is_read_and_frees_its_thread(tiny_bundle: Path) -> None:
    options = EngineOptions(num_threads=1)
    for stream in (Engine(tiny_bundle, options).submit(PROMPT, LONG), None):
        engine = Engine(tiny_bundle, options)
        thread, gone = engine._core.thread._thread, weakref.ref(engine._core)
        if stream is not None:
            assert stream.result().finish_reason is FinishReason.LENGTH
            unread = engine.submit(PROMPT, LONG)
        del engine
        gc.collect()
        assert gone() is None
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert unread.result().finish_reason is FinishReason.LENGTH
