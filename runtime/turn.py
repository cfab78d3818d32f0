"""What one step does for a request, and which requests share a call of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from specexport.runtime.draft import Draft
from specexport.runtime.request import Request

# A call more reads all the weights once more, which on a CPU takes as long as about so many tokens
# of a larger call (docs/architecture.md).
_CALL_TOKENS = 20
_NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Turn:
    """The next `num_tokens` of a request's text, then a draft."""

    request: Request
    num_tokens: int
    draft: Draft = _NO_DRAFT

    @property
    def is_whole(self) -> bool:
        """True where the text is computed to its end, so that the target's own token follows."""
        return self.num_tokens == self.request.num_pending

    @property
    def width(self) -> int:
        """Query tokens."""
        return self.num_tokens + len(self.draft)


def share_calls(widths: Sequence[int]) -> list[list[int]]:
    """Which rows of a step run together: lists of indices, that of the narrowest rows first.

    Rows that run together are padded to the widest, so a long part of a prompt runs alone unless
    it is hardly longer than the others.
    """
    order = sorted(range(len(widths)), key=widths.__getitem__)
    alone: list[list[int]] = []
    while len(order) > 1:
        widest, next_widest = widths[order[-1]], widths[order[-2]]
        if (len(order) - 1) * (widest - next_widest) <= _CALL_TOKENS:
            break
        alone.append([order.pop()])
    return [call for call in (sorted(order), *reversed(alone)) if call]
