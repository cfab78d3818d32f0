"""What an asyncio task reads of its requests: one output, or several."""

from asyncio import AbstractEventLoop, Event
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from specexport.runtime.commit import NewTokens
from specexport.runtime.output import Chunk, Completion, Output, check_streamable, kept
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request
from specexport.runtime.stats import RequestStats
from specexport.runtime.stream import Cancel


class AsyncStream:
    """The output of one request, chunk by chunk. Leaving it as a context cancels what is left.

    Used on the event loop that it was submitted on; a chunk goes to one reader.
    """

    def __init__(
        self, output: Output, cancel: Cancel, arrived: Event, event_loop: AbstractEventLoop
    ) -> None:
        """Made by `AsyncEngine.submit`; `arrived` is set when something comes."""
        self._output, self._cancel = output, cancel
        self._arrived, self._event_loop = arrived, event_loop
        self._chunks: deque[Chunk] = deque()
        self._is_finished = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come; raises `EngineError` where the request failed."""
        while True:
            await _wait(self._arrived, lambda: self._is_finished or self.has_chunks)
            if not self._chunks:
                break
            yield self._chunks.popleft()
        self._output.check()

    @property
    def request(self) -> Request:
        """What the engine works on; read what came of it from the stream."""
        return self._output.request

    @property
    def stats(self) -> RequestStats:
        """Times and acceptance of this request, as of its last chunk."""
        return self._output.stats

    @property
    def is_finished(self) -> bool:
        """True when everything has come, whether it was read or not."""
        return self._is_finished

    @property
    def has_chunks(self) -> bool:
        """True when chunks have come that were not read."""
        return bool(self._chunks)

    def cancel(self) -> None:
        """End the request, after the step that runs; what it has can still be read."""
        self._cancel(self.request)

    def take(self) -> list[Chunk]:
        """The chunks that have come and were not read yet; waits for none."""
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    async def result(self) -> Completion:
        """Wait for the whole output; raises `EngineError` where the request failed.

        The request goes on where the waiting is cancelled or times out; chunks can still be read.
        """
        await _wait(self._arrived, lambda: self._is_finished)
        return self._output.completion()

    def push(self, new: NewTokens) -> None:
        """Called by the engine with what a step gave, on the engine's thread."""
        chunk = self._output.add(new)
        try:
            self._event_loop.call_soon_threadsafe(self._receive, chunk)
        except RuntimeError:  # the event loop is closed: nobody is left to read
            self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def _receive(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._is_finished = chunk.finish_reason is not None
        self._arrived.set()


class AsyncStreamGroup:
    """The outputs of one request that asked for several; like an `AsyncStream` in all else."""

    def __init__(
        self, streams: Sequence[AsyncStream], params: SamplingParams, arrived: Event
    ) -> None:
        """Made by `AsyncEngine.submit_many`; `arrived` is what the streams set."""
        self._params, self._arrived = params, arrived
        self.streams = tuple(streams)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Chunks as they come, each with the number of its output.

        Raises `RequestError` where only the best outputs are kept, and `EngineError` in the end
        where an output failed.
        """
        check_streamable(self._params)
        while chunks := await self._next():
            for chunk in chunks:
                yield chunk
        await self.results()

    @property
    def is_finished(self) -> bool:
        """True when everything has come, whether it was read or not."""
        return all(stream.is_finished for stream in self.streams)

    def cancel(self) -> None:
        """End all of them, after the step that runs; what they have can still be read."""
        for stream in self.streams:
            stream.cancel()

    async def results(self) -> list[Completion]:
        """Wait for all; the outputs in their order, or the best ones, best first.

        Raises as `AsyncStream.result` does.
        """
        return kept([await stream.result() for stream in self.streams], self._params)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    async def _next(self) -> list[tuple[int, Chunk]]:
        """What has come, at least one chunk; nothing after the last."""
        await _wait(
            self._arrived,
            lambda: self.is_finished or any(stream.has_chunks for stream in self.streams),
        )
        return [(i, chunk) for i, stream in enumerate(self.streams) for chunk in stream.take()]


async def _wait(arrived: Event, holds: Callable[[], bool]) -> None:
    while not holds():
        arrived.clear()
        await arrived.wait()
