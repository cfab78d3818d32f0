"""A smaller model that shares the target's tokenizer drafts token by token."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import StepRunner
from specexport.runtime.batch import Batch, Row
from specexport.runtime.distribution import Distribution, to_distribution
from specexport.runtime.drafters.base import Draft, DraftRequest
from specexport.runtime.random import Purpose, uniform
from specexport.runtime.request import Request


class DraftModelDrafter:
    """Runs the draft model over the same slots as the target, in a cache of its own.

    It catches up on `token_ids[num_computed:]`, so prefill, bonus token and rejection are one case.
    Past the end of its own context it proposes nothing.
    """

    def __init__(self, runner: StepRunner, vocab_size: int) -> None:
        """`vocab_size` is the target's: padding ids that only one model has are never drafted."""
        self._runner = runner
        self._num_shared = min(vocab_size, runner.spec.vocab_size)
        self._num_computed: dict[int, int] = {}  # by request id; no entry: 0

    @property
    def engine_time_s(self) -> float:
        """Seconds inside the inference library."""
        return self._runner.run_time_s

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """Draw up to `max_tokens` tokens for each from the draft model's own distribution."""
        texts = [list(w.request.token_ids) for w in wanted]
        drawn: list[list[Distribution]] = [[] for _ in wanted]
        limits = [self._limit(w) for w in wanted]
        for k in range(max(limits)):
            active = [i for i, limit in enumerate(limits) if k < limit]
            requests = [wanted[i].request for i in active]
            distributions = self._compute(requests, [texts[i] for i in active])
            for i, distribution in zip(active, distributions, strict=True):
                draw = uniform(wanted[i].request.params.seed, len(texts[i]), Purpose.DRAFT)
                texts[i].append(distribution.sample(draw))
                drawn[i].append(distribution)
        return [
            Draft(tuple(text[len(text) - len(probs) :]), tuple(probs))
            for text, probs in zip(texts, drawn, strict=True)
        ]

    def observe(self, request: Request) -> None:
        """Forget cache entries of rejected tokens."""
        computed = self._num_computed.get(request.id, 0)
        self._num_computed[request.id] = min(computed, len(request.token_ids) - 1)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Move the cache with the request."""
        self._runner.move_slot(source, destination, min(length, self._runner.profile.max_length))

    def release(self, request: Request) -> None:
        """Forget the request."""
        self._num_computed.pop(request.id, None)

    def close(self) -> None:
        """Free the draft model."""
        self._runner.close()

    def _limit(self, wanted: DraftRequest) -> int:
        """No draft past the draft model's context, nor after a token id that it does not have."""
        tokens = wanted.request.token_ids
        new = tokens[self._num_computed.get(wanted.request.id, 0) :]
        if max(new) >= self._runner.spec.vocab_size:
            return 0
        return max(min(wanted.max_tokens, self._runner.profile.max_length - len(tokens)), 0)

    def _compute(self, requests: list[Request], texts: list[list[int]]) -> list[Distribution]:
        """Compute each text to its end, in chunks; the distributions of the next tokens."""
        chunk = max(self._runner.profile.max_query // len(requests), 1)
        while any(self._pending(r, t) > chunk for r, t in zip(requests, texts, strict=True)):
            # Every text keeps a token for the last step, which gives the logits.
            self._step(requests, [text[:-1] for text in texts], chunk, num_logits=0)
        logits_start, logits = self._step(requests, texts, chunk, num_logits=1)
        return [
            to_distribution(logits[logits_start[r.slot], : self._num_shared], r.params)
            for r in requests
        ]

    def _pending(self, request: Request, text: list[int]) -> int:
        return len(text) - self._num_computed.get(request.id, 0)

    def _step(
        self, requests: list[Request], texts: list[list[int]], chunk: int, *, num_logits: int
    ) -> tuple[tuple[int, ...], NDArray[np.float32]]:
        """Compute at most `chunk` tokens of each text; rows that have nothing to do are idle."""
        max_length = self._runner.profile.max_length
        rows = [Row.idle(max_length) for _ in range(max(r.slot for r in requests) + 1)]
        for request, text in zip(requests, texts, strict=True):
            start = self._num_computed.get(request.id, 0)
            if tokens := text[start : start + chunk]:
                rows[request.slot] = Row(start, tokens, num_logits)
                self._num_computed[request.id] = start + len(tokens)
        batch = Batch.build(rows, max_length, self._runner.spec.sliding_window)
        return batch.logits_start, self._runner.run(batch.step).logits
