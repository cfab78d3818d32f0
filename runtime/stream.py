"""What a thread reads of its requests: one output, or several."""

from collections.abc import Callable, Iterator, Sequence
from threading import Condition
from typing import Self

from specexport.runtime.commit import NewTokens
from specexport.runtime.output import Chunk, Completion, Output, check_streamable, kept
from specexport.runtime.params import SamplingParams
from specexport.runtime.reading import Cancel, Reading, ReadingGroup


class Stream(Reading):
    """The output of one request, chunk by chunk. Leaving it as a context cancels what is left.

    Its methods may be called from any thread; a chunk goes to one reader.
    """

    def __init__(self, output: Output, cancel: Cancel, arrived: Condition) -> None:
        """Made by `Engine.submit`; `arrived` is notified when something comes."""
        super().__init__(output, cancel)
        self._arrived = arrived

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come; raises `EngineError` where the request failed."""
        while (chunk := self._next()) is not None:
            yield chunk
        self._output.check()

    def take(self) -> list[Chunk]:
        """The chunks that have come and were not read yet; waits for none."""
        with self._arrived:
            chunks = list(self._chunks)
            self._chunks.clear()
        return chunks

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the whole output; chunks can still be read after it.

        Raises `EngineError` where the request failed, and `TimeoutError` when `timeout_s` passes
        first: the request goes on.
        """
        _wait_for_all(self._arrived, lambda: self._is_finished, timeout_s)
        return self._output.completion()

    def push(self, new: NewTokens) -> None:
        """Called by the engine with what a step gave."""
        chunk = self._output.add(new)
        with self._arrived:
            self._add(chunk)
            self._arrived.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _next(self) -> Chunk | None:
        """The next chunk; None after the last."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._is_finished or self.has_chunks)
            return self._chunks.popleft() if self._chunks else None


class StreamGroup(ReadingGroup[Stream]):
    """The outputs of one request that asked for several; like a `Stream` in all else."""

    def __init__(
        self, streams: Sequence[Stream], params: SamplingParams, arrived: Condition
    ) -> None:
        """Made by `Engine.submit_many`; `arrived` is what the streams notify."""
        super().__init__(streams, params)
        self._arrived = arrived

    def __iter__(self) -> Iterator[tuple[int, Chunk]]:
        """Chunks as they come, each with the number of its output.

        Raises `RequestError` where only the best outputs are kept, and `EngineError` in the end
        where an output failed.
        """
        check_streamable(self._params)
        while chunks := self._next():
            yield from chunks
        self.results()

    def results(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for all; the outputs in their order, or the best ones, best first.

        Raises as `Stream.result` does.
        """
        _wait_for_all(self._arrived, lambda: self.is_finished, timeout_s)
        return kept([stream.result() for stream in self.streams], self._params)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _next(self) -> list[tuple[int, Chunk]]:
        """What has come, at least one chunk; nothing after the last."""
        with self._arrived:
            self._arrived.wait_for(lambda: self.is_finished or self.has_chunks)
            return [(i, chunk) for i, stream in enumerate(self.streams) for chunk in stream.take()]


def _wait_for_all(arrived: Condition, holds: Callable[[], bool], timeout_s: float | None) -> None:
    with arrived:
        if not arrived.wait_for(holds, timeout_s):
            raise TimeoutError(
                f"Not finished after {timeout_s} s. The request goes on: wait again, or cancel it."
            )
