"""What an asyncio task reads of its requests: one output, or several."""

from asyncio import AbstractEventLoop, Event
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from specexport.runtime.commit import NewTokens
from specexport.runtime.output import Chunk, Completion, Output, check_streamable, kept
from specexport.runtime.params import SamplingParams
from specexport.runtime.reading import Cancel, Reading, ReadingGroup


class AsyncStream(Reading):
    """The output of one request, chunk by chunk. Leaving it as a context cancels what is left.

    Used on the event loop that it was submitted on; a chunk goes to one reader.
    """

    def __init__(
        self, output: Output, cancel: Cancel, arrived: Event, event_loop: AbstractEventLoop
    ) -> None:
        """Made by `AsyncEngine.submit`; `arrived` is set when something comes."""
        super().__init__(output, cancel)
        self._arrived, self._event_loop = arrived, event_loop

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come; raises `EngineError` where the request failed."""
        while True:
            await _wait(self._arrived, lambda: self._is_finished or self.has_chunks)
            if not self._chunks:
                break
            yield self._chunks.popleft()
        self._output.check()

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
        self._add(chunk)
        self._arrived.set()


class AsyncStreamGroup(ReadingGroup[AsyncStream]):
    """The outputs of one request that asked for several; like an `AsyncStream` in all else."""

    def __init__(
        self, streams: Sequence[AsyncStream], params: SamplingParams, arrived: Event
    ) -> None:
        """Made by `AsyncEngine.submit_many`; `arrived` is what the streams set."""
        super().__init__(streams, params)
        self._arrived = arrived

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
            lambda: self.is_finished or self.has_chunks,
        )
        return [(i, chunk) for i, stream in enumerate(self.streams) for chunk in stream.take()]


async def _wait(arrived: Event, holds: Callable[[], bool]) -> None:
    while not holds():
        arrived.clear()
        await arrived.wait()
