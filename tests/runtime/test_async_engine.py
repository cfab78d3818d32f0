"""The engine on an event loop: never blocked, nothing left running, nothing lost."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from specexport import (
    AsyncEngine,
    AsyncStream,
    Chunk,
    Completion,
    EngineOptions,
    FinishReason,
    SamplingParams,
)
from specexport.errors import EngineError, QueueFullError, RequestError
from specexport.runtime.output import Output
from tests.turnstile import PATIENCE_S, Turnstile, held, loop_of

PROMPT = "to be or not to be, to be or"
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
TWO = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=1, n=2)
OPTIONS = EngineOptions(max_slots=3, max_waiting=6, num_threads=1)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(tiny_bundle, OPTIONS)
    yield engine
    asyncio.run(engine.close())


async def stands(turnstile: Turnstile) -> None:
    """A step has come to the turnstile; other tasks run on meanwhile."""
    await asyncio.to_thread(turnstile.wait)


def test_many_tasks_get_what_each_gets_alone(engine: AsyncEngine) -> None:
    def params(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=5 + i, temperature=0.8 * (i % 2), seed=i)

    async def run(i: int) -> tuple[str, tuple[int, ...]]:
        stream = await engine.submit(PROMPT * (1 + i % 3), params(i))
        chunks = [chunk async for chunk in stream]
        result = await stream.result()
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason is result.finish_reason
        assert stream.stats == result.stats
        return result.text, result.token_ids

    async def main() -> None:
        alone = [await run(i) for i in range(9)]
        assert list(await asyncio.gather(*map(run, range(9)))) == alone

    asyncio.run(main())


def test_the_event_loop_runs_on_while_a_step_runs(engine: AsyncEngine) -> None:
    async def main() -> Completion:
        with held(loop_of(engine)) as turnstile:
            stream = await engine.submit(PROMPT, LONG)
            await stands(turnstile)
            with pytest.raises(TimeoutError):  # the waiting ends, the request goes on
                await asyncio.wait_for(stream.result(), 0.001)
            assert engine.stats().num_waiting == 1
            assert not stream.is_finished
            assert stream.take() == []
        return await stream.result()

    assert len(asyncio.run(main()).token_ids) == 60


def test_a_task_cancelled_inside_a_stream_cancels_the_request(engine: AsyncEngine) -> None:
    streams: list[AsyncStream] = []

    async def read(turnstile: Turnstile) -> None:
        async with await engine.submit(PROMPT, LONG) as stream:
            streams.append(stream)
            turnstile.let()
            async for _ in stream:
                reading.set()

    async def main() -> Completion:
        with held(loop_of(engine)) as turnstile:
            task = asyncio.create_task(read(turnstile))
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await streams[0].result()

    reading = asyncio.Event()
    result = asyncio.run(main())
    assert result.finish_reason is FinishReason.CANCELLED
    assert 0 < len(result.token_ids) < 60


def test_leaving_a_stream_or_a_group_early_cancels_it(engine: AsyncEngine) -> None:
    async def main() -> list[Completion]:
        with held(loop_of(engine)) as turnstile:
            async with (
                await engine.submit(PROMPT, LONG) as stream,
                await engine.submit_many(PROMPT, TWO) as group,
            ):
                turnstile.let()
                await anext(stream.__aiter__())
        return [await stream.result(), *await group.results()]

    results = asyncio.run(main())
    assert {result.finish_reason for result in results} == {FinishReason.CANCELLED}


def test_a_cancelled_submit_queues_nothing(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = Event(), Event()
    prepare = engine._core.prepare

    def slow(*arguments: object) -> list[Output]:
        entered.set()
        assert leave.wait(PATIENCE_S)
        return prepare(*arguments)  # type: ignore[arg-type]

    async def main() -> None:
        task = asyncio.create_task(engine.submit(PROMPT, LONG))
        assert await asyncio.to_thread(entered.wait, PATIENCE_S)  # the event loop is free
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leave.set()

    monkeypatch.setattr(engine._core, "prepare", slow)
    before = engine.stats().num_finished
    asyncio.run(main())  # waits for its threads
    stats = engine.stats()
    assert (stats.num_finished, stats.num_running, stats.num_waiting) == (before, 0, 0)


def test_a_closed_event_loop_ends_its_requests_and_harms_no_others(engine: AsyncEngine) -> None:
    async def leave() -> AsyncStream:
        return await engine.submit(PROMPT, LONG)

    async def read() -> Completion:
        return await (await engine.submit(PROMPT, LONG)).result()

    with held(loop_of(engine)):
        left = asyncio.run(leave())
    assert len(asyncio.run(read()).token_ids) == 60
    assert left.request.finish_reason is FinishReason.CANCELLED
    assert left.request.num_output < 60


def test_a_group_gives_its_outputs_as_they_come(engine: AsyncEngine) -> None:
    async def main() -> None:
        alone = [await (await engine.submit(PROMPT, c)).result() for c in TWO.choices()]
        with held(loop_of(engine)) as turnstile:
            group = await engine.submit_many(PROMPT, TWO)
            turnstile.let()
            chunks = group.__aiter__()
            found = [await anext(chunks), await anext(chunks)]
            assert [index for index, _ in found] == [0, 1]
        found += [pair async for pair in chunks]
        texts = ["".join(c.text for i, c in found if i == index) for index in (0, 1)]
        assert texts == [r.text for r in alone] == [r.text for r in await group.results()]
        assert group.is_finished

    asyncio.run(main())


def test_the_best_outputs_are_those_of_the_synchronous_rule(engine: AsyncEngine) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=1.0, seed=2, n=1, best_of=4, max_tokens=6)
        group = await engine.submit_many(PROMPT, params)
        (best,) = await group.results()
        drawn = [await (await engine.submit(PROMPT, c)).result() for c in params.choices()]
        assert best.token_ids == max(drawn, key=lambda d: d.mean_logprob).token_ids
        with pytest.raises(RequestError, match="known in the end"):
            await anext(group.__aiter__())
        with pytest.raises(RequestError, match="best_of is 4, but `submit` gives one output"):
            await engine.submit(PROMPT, params)

    asyncio.run(main())


def test_a_conversation_is_formatted_by_the_chat_template(engine: AsyncEngine) -> None:
    async def main() -> None:
        messages = [{"role": "user", "content": "hi"}]
        stream = await engine.submit_chat(messages, LONG, priority=3, timeout_s=3600)
        ids = engine.tokenizer.encode_chat(messages)
        assert (await stream.result()).token_ids == (
            await (await engine.submit(ids, LONG)).result()
        ).token_ids
        assert stream.request.priority == 3
        assert stream.request.deadline_s is not None

    asyncio.run(main())


def test_what_cannot_be_served_or_queued_is_refused(engine: AsyncEngine) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="The prompt is empty"):
            await engine.submit("")
        with held(loop_of(engine)):
            streams = [await engine.submit(PROMPT, LONG) for _ in range(8)]
            with pytest.raises(QueueFullError, match="room for 1 more, not for 2"):
                await engine.submit_many(PROMPT, TWO)
        await asyncio.gather(*(stream.result() for stream in streams))

    asyncio.run(main())


def test_a_request_that_fails_raises_for_who_reads_it(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("no more paper")

    async def main() -> list[Chunk]:
        stream = await engine.submit(PROMPT, LONG)
        with pytest.raises(EngineError, match="no more paper"):
            await stream.result()
        chunks = stream.take()
        with pytest.raises(EngineError, match="no more paper"):
            await anext(stream.__aiter__())
        return chunks

    monkeypatch.setattr(loop_of(engine)._target, "run", fail)
    chunks = asyncio.run(main())
    assert [chunk.finish_reason for chunk in chunks] == [FinishReason.ERROR]


def test_draining_finishes_and_closing_cancels(tiny_bundle: Path) -> None:
    async def main() -> list[Completion]:
        engine = await asyncio.to_thread(AsyncEngine, tiny_bundle, OPTIONS)
        async with engine:
            with held(loop_of(engine)) as turnstile:
                streams = [await engine.submit(PROMPT, LONG) for _ in range(3)]
                await stands(turnstile)
                assert not await engine.drain(timeout_s=0.001)
                with pytest.raises(EngineError, match="engine drains"):
                    await engine.submit(PROMPT)
            assert await engine.drain()
        await engine.close()
        with pytest.raises(EngineError, match="engine is closed"):
            await engine.submit(PROMPT)
        engine = AsyncEngine(tiny_bundle, OPTIONS)
        async with engine:
            with held(loop_of(engine)) as turnstile:
                streams += [await engine.submit(PROMPT, LONG) for _ in range(2)]
                reader = asyncio.create_task(streams[-1].result())
                await stands(turnstile)
                turnstile.before_next(engine._core.thread.close)
                await reader
        return [await stream.result() for stream in streams]

    reasons = [result.finish_reason for result in asyncio.run(main())]
    assert reasons == [FinishReason.LENGTH] * 3 + [FinishReason.CANCELLED] * 2


def test_a_cancelled_drain_leaves_others_waiting(tiny_bundle: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(tiny_bundle, OPTIONS) as engine:
            with held(loop_of(engine)):
                stream = await engine.submit(PROMPT, LONG)
                first, second = (asyncio.create_task(engine.drain()) for _ in range(2))
                await asyncio.sleep(0)
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
            assert await second
            assert (await stream.result()).finish_reason is FinishReason.LENGTH

    asyncio.run(main())
