"""The text of one output as it grows, up to the first stop text."""

from collections.abc import Sequence

from specexport.runtime.tokenizer import TextStream


class OutputText:
    """Decodes tokens one by one and watches for stop texts, wherever token boundaries lie.

    What could be the beginning of a stop text is held back until it is known not to be. Of several
    stop texts the one that is complete first counts.
    """

    def __init__(
        self,
        stream: TextStream,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """A stop text that is complete before token number `min_tokens` does not count."""
        self._stream, self._stop = stream, tuple(stop)
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._num_tokens = self._num_searched = 0
        self._ready, self._held = "", ""
        self._is_stopped = False

    def push(self, token_id: int) -> str | None:
        """Take the next token; the stop text that it completes, if any."""
        self._num_tokens += 1
        self._held += self._stream.push([token_id])
        if not self._stop:
            self._release(len(self._held))
            return None
        text = self._held + self._stream.unfinished()
        if self._num_tokens >= self._min_tokens and (found := self._find(text)):
            start, stop = found
            self._ready += text[: start + len(stop) if self._include_stop else start]
            self._held, self._is_stopped = "", True
            return stop
        self._num_searched = len(text)
        self._release(len(self._held) - self._num_suspicious())
        return None

    def take(self) -> str:
        """Text that is certain by now and was not taken yet."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """The rest, once no more tokens come: a character cut off shows as U+FFFD."""
        if self._is_stopped:
            return self.take()
        text = self.take() + self._held + self._stream.finish()
        self._held = ""
        return text

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where the stop text begins that ends first in what is new; of those the longest."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(self._num_searched - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _num_suspicious(self) -> int:
        """Length of the longest end of the held text that may begin a stop text."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, num_chars: int) -> None:
        self._ready += self._held[:num_chars]
        self._held = self._held[num_chars:]
        self._num_searched = max(self._num_searched - num_chars, 0)
