"""The caches of target and drafter behind the slots, and what is kept of them for later."""

from collections.abc import Sequence
from contextlib import suppress

from specexport.engines.step import StepRunner
from specexport.runtime.drafters.base import Drafter
from specexport.runtime.prefix_cache import BLOCK_TOKENS, Entries, Piece, PrefixCache, num_shared
from specexport.runtime.request import Request
from specexport.runtime.stats import PrefixStats

_WORTH_WAITING = 32
"""Tokens that need not be computed twice."""


class CacheSlots:
    """Fills, moves and keeps what slots hold. Implements the scheduler's `Slots`."""

    def __init__(self, target: StepRunner, drafter: Drafter, prefixes: PrefixCache) -> None:
        self._target, self._drafter, self._prefixes = target, drafter, prefixes
        self._num_kept: dict[int, int] = {}  # tokens of each running request, whole blocks
        self._first_own: dict[int, int] = {}  # where what each one computed itself may begin
        self._stats = PrefixStats()

    def fill(self, request: Request) -> None:
        """Put in the longest known prefix of the request's text, and count it as computed."""
        if self._prefixes.is_off:
            return
        limit = _most_reusable(request)
        pieces = self._prefixes.longest(request.token_ids[: limit + 1])
        try:
            request.num_computed = self._restore(request, pieces, limit) if pieces else 0
        except Exception:  # a copy that cannot be made: then all is computed
            self._drafter.pause(request)
        num_known = _whole_blocks(pieces[-1].stop if pieces else 0)
        self._num_kept[request.id] = num_known
        self._first_own.setdefault(request.id, num_known)
        self._stats.record(request.num_computed)

    def is_under_way(self, request: Request, running: Sequence[Request]) -> bool:
        """True where another's prompt has a good part of this one's text, and is kept soon."""
        if self._prefixes.is_off:
            return False
        limit = _most_reusable(request)
        return any(
            min(num_shared(other.token_ids, request.token_ids), limit)
            >= self._num_kept.get(other.id, 0) + _WORTH_WAITING
            for other in running
            # What a step computes is kept in the next one.
            if other.is_catching_up or not other.stats.num_decode_steps
        )

    def move(self, request: Request, destination: int) -> None:
        """Copy what is computed of the request to another slot."""
        self._target.move_slot(request.slot, destination, request.num_computed)
        self._drafter.move_slot(request.slot, destination, request.num_computed)

    def keep_blocks(self, request: Request) -> None:
        """Keep the blocks that have become whole, between drafting and the target's step."""
        if request.num_computed - self._num_kept.get(request.id, 0) >= BLOCK_TOKENS:
            self._keep(request, _whole_blocks(self._drafter.num_reusable(request)))

    def keep(self, request: Request) -> None:
        """Keep all of a request that is about to lose its slot before it has ended."""
        self._keep(request, self._drafter.num_reusable(request))
        self._num_kept.pop(request.id, None)
        self._drafter.pause(request)

    def end(self, request: Request) -> None:
        """Keep all of a request that has ended, and forget the request itself.

        Of one that failed nothing stays: its entries may be NaN.
        """
        first_own = self._first_own.pop(request.id, None)
        if request.error is None:
            if request.slot >= 0:
                self._keep(request, self._drafter.num_reusable(request))
        elif first_own is not None:
            self._prefixes.forget(request.token_ids, first_own)
        self._num_kept.pop(request.id, None)
        self._drafter.release(request)

    def stats(self) -> PrefixStats:
        """Counters since the start, and what is kept now."""
        return self._stats.now(self._prefixes.size_bytes)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where what is kept contradicts itself."""
        self._prefixes.check_integrity()

    def _keep(self, request: Request, num_tokens: int) -> None:
        if self._prefixes.is_off:
            return

        def read(start: int, stop: int) -> Entries:
            target = self._target.read_cache(request.slot, start, stop)
            return Entries(target, self._drafter.save(request, start, stop))

        # What cannot be copied, for want of memory, is not kept.
        with suppress(Exception):
            self._prefixes.put(request.token_ids[:num_tokens], read)
        self._num_kept[request.id] = _whole_blocks(num_tokens)

    def _restore(self, request: Request, pieces: Sequence[Piece], limit: int) -> int:
        """Put pieces into the request's slot; how many tokens count as computed."""
        num_known = self._drafter.restore(request, pieces, limit)
        for piece in pieces:
            size = min(piece.stop, num_known) - piece.start
            if size > 0:
                entries = piece.entries.target[..., :size, :]
                self._target.write_cache(request.slot, piece.start, entries)
        return num_known


def _most_reusable(request: Request) -> int:
    """Tokens that need not be computed: all but the last, and those whose logits are wanted."""
    limit = request.num_computed_before or len(request.token_ids) - 1
    if request.params.prompt_logprobs and request.num_output == 0:
        limit = min(limit, len(request.prompt_logprobs))
    return limit


def _whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
