"""The engine that programs embed: load a bundle, submit prompts, iterate over what comes."""

from collections.abc import Sequence
from threading import Condition
from typing import Self

from specexport.runtime.core import Loaded, Prompt, single
from specexport.runtime.params import SamplingParams
from specexport.runtime.stream import Stream, StreamGroup
from specexport.runtime.tokenizer import Message


class Engine(Loaded):
    """A loaded bundle and the thread that runs it. Every method may be called from any thread."""

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Stream:
        """Queue a prompt (text or token ids); requests of a higher priority go first.

        What is not finished after `timeout_s` ends with reason `timeout`. Raises `RequestError` if
        it cannot be served, `QueueFullError` if too many wait, `EngineError` after `drain` or
        `close`.
        """
        group = self.submit_many(prompt, single(params), priority=priority, timeout_s=timeout_s)
        return group.streams[0]

    def submit_many(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> StreamGroup:
        """Queue a prompt whose `params` may ask for several outputs (`n`, `best_of`): all or none.

        Raises as `submit` does.
        """
        outputs = self._core.prepare(prompt, params, priority, timeout_s)
        arrived = Condition()
        streams = [Stream(output, self._core.thread.cancel, arrived) for output in outputs]
        self._core.thread.submit(streams)
        return StreamGroup(streams, params, arrived)

    def submit_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Stream:
        """Queue a conversation, formatted by the model's own chat template; raises as `submit`."""
        token_ids = self.tokenizer.encode_chat(messages)
        return self.submit(token_ids, params, priority=priority, timeout_s=timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests and wait for those that there are; False when time passed first."""
        try:
            self._core.thread.drain().result(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cancel what runs, after the step that runs, and free the engines."""
        self._core.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
