"""The engine for asyncio: as `Engine`, without ever blocking the event loop once it is loaded."""

import asyncio
from collections.abc import Sequence
from typing import Self

from specexport.runtime.async_stream import AsyncStream, AsyncStreamGroup
from specexport.runtime.core import Loaded, Prompt, single
from specexport.runtime.params import SamplingParams
from specexport.runtime.tokenizer import Message


class AsyncEngine(Loaded):
    """A loaded bundle and the thread that runs it, for any number of event loops.

    Loading takes its time: where an event loop is busy already, use
    `await asyncio.to_thread(AsyncEngine, bundle, options)`.
    """

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """As `Engine.submit`. Nothing is queued where this is cancelled."""
        group = await self.submit_many(
            prompt, single(params), priority=priority, timeout_s=timeout_s
        )
        return group.streams[0]

    async def submit_many(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncStreamGroup:
        """As `Engine.submit_many`. Nothing is queued where this is cancelled."""
        # Tokenizing a long prompt or compiling a grammar would hold up the event loop.
        outputs = await asyncio.to_thread(self._core.prepare, prompt, params, priority, timeout_s)
        arrived, event_loop = asyncio.Event(), asyncio.get_running_loop()
        cancel = self._core.thread.cancel
        streams = [AsyncStream(output, cancel, arrived, event_loop) for output in outputs]
        self._core.thread.submit(streams)
        return AsyncStreamGroup(streams, params, arrived)

    async def submit_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """As `Engine.submit_chat`. Nothing is queued where this is cancelled."""
        token_ids = await asyncio.to_thread(self.tokenizer.encode_chat, messages)
        return await self.submit(token_ids, params, priority=priority, timeout_s=timeout_s)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests and wait for those that there are; False when time passed first."""
        drained = asyncio.wrap_future(self._core.thread.drain())
        try:
            await asyncio.wait_for(drained, timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Cancel what runs, after the step that runs, and free the engines."""
        await asyncio.to_thread(self._core.thread.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
