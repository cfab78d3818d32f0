"""What streams for threads and for asyncio have in common."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from specexport.runtime.output import Chunk, Output
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Request
from specexport.runtime.stats import RequestStats

Cancel = Callable[[Request], None]


class Reading:
    """The output of one request as its reader sees it."""

    def __init__(self, output: Output, cancel: Cancel) -> None:
        self._output, self._cancel = output, cancel
        self._chunks: deque[Chunk] = deque()
        self._is_finished = False

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

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._is_finished = chunk.finish_reason is not None


R = TypeVar("R", bound=Reading)


class ReadingGroup(Generic[R]):
    """The outputs of one request that asked for several."""

    def __init__(self, streams: Sequence[R], params: SamplingParams) -> None:
        self._params = params
        self.streams = tuple(streams)

    @property
    def is_finished(self) -> bool:
        """True when everything has come, whether it was read or not."""
        return all(stream.is_finished for stream in self.streams)

    @property
    def has_chunks(self) -> bool:
        """True when chunks have come that were not read."""
        return any(stream.has_chunks for stream in self.streams)

    def cancel(self) -> None:
        """End all of them, after the step that runs; what they have can still be read."""
        for stream in self.streams:
            stream.cancel()
