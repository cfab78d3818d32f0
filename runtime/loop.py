"""The loop: draft → run the target → verify → commit, over all running requests at once."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specexport.engines.step import StepOutput, StepRunner
from specexport.errors import SpecExportError
from specexport.runtime.batch import Batch, Row
from specexport.runtime.distribution import Distribution, to_distribution
from specexport.runtime.drafters.base import Draft, Drafter, DraftRequest
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.scheduler import Scheduler
from specexport.runtime.stats import AcceptanceStats, EngineStats
from specexport.runtime.verify import Verdict, verify


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one step added to a request; the last of a request has its finish reason set."""

    request: Request
    token_ids: tuple[int, ...]


class SpeculativeLoop:
    """Drives one target and one drafter. Not thread-safe."""

    def __init__(
        self,
        target: StepRunner,
        drafter: Drafter,
        num_speculative_tokens: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """`num_speculative_tokens` is the draft length limit K; 0 decodes plainly."""
        self._target, self._drafter = target, drafter
        self._num_speculative_tokens = num_speculative_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._scheduler = Scheduler(target.profile.max_slots, self._move_slot)
        self._acceptance = AcceptanceStats()
        self._num_steps = self._num_finished = self._num_output = 0
        self._draft_time_s = self._total_time_s = 0.0

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; `step` will pick it up."""
        self._scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request now, keeping what it has."""
        if request.finish_reason is None:
            self._finish(request, FinishReason.CANCELLED)

    def step(self) -> list[NewTokens]:
        """Run one step for all running requests; returns what each of them got.

        A row that fails (NaN logits) ends with `FinishReason.ERROR`, the others go on. When the
        engine itself fails, all running requests end so.
        """
        started = time.perf_counter()
        requests = self._scheduler.next()
        for request in requests:
            request.stats.started_s = request.stats.started_s or started
        try:
            drafts = self._draft(requests)
            batch = self._build(requests, drafts)
            output = self._target.run(batch.step)
        except Exception as error:  # whatever it is, the engine must go on
            return self._fail(requests, _reason(error))
        self._num_steps += 1
        results = self._commit(requests, drafts, batch, output)
        self._total_time_s += time.perf_counter() - started
        return results

    def stats(self) -> EngineStats:
        """Counters since the loop was made."""
        acceptance = AcceptanceStats()
        acceptance.add(self._acceptance)
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_finished=self._num_finished,
            num_steps=self._num_steps,
            num_output_tokens=self._num_output,
            acceptance=acceptance,
            draft_time_s=self._draft_time_s,
            target_time_s=self._target.run_time_s,
            total_time_s=self._total_time_s,
            engine_time_s=self._target.run_time_s + self._drafter.engine_time_s,
        )

    def close(self) -> None:
        """Free the engines."""
        self._drafter.close()
        self._target.close()

    def _prefill_chunk(self, num_rows: int) -> int:
        """Most pending tokens of a row in one step: all rows share one budget.

        There is always room for a whole draft beside them, so that where drafts begin, and with
        it a seeded output, does not depend on the batch.
        """
        return max(self._target.profile.max_query // num_rows - self._num_speculative_tokens, 1)

    def _draft(self, requests: Sequence[Request]) -> list[Draft]:
        """A draft for each request whose pending tokens all fit this step; empty for the others."""
        started = time.perf_counter()
        chunk = self._prefill_chunk(len(requests))
        room = [
            min(self._num_speculative_tokens, r.num_left - 1) if r.num_pending <= chunk else 0
            for r in requests
        ]
        wanted = [DraftRequest(r, size) for r, size in zip(requests, room, strict=True) if size > 0]
        proposed = iter(self._drafter.propose(wanted) if wanted else [])
        drafts = [next(proposed) if size > 0 else Draft() for size in room]
        self._draft_time_s += time.perf_counter() - started
        return drafts

    def _build(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> Batch:
        chunk = self._prefill_chunk(len(requests))
        rows = []
        for request, draft in zip(requests, drafts, strict=True):
            pending = request.token_ids[request.num_computed :]
            if len(pending) <= chunk:
                tokens = [*pending, *draft.token_ids]
                rows.append(Row(request.num_computed, tokens, len(draft.token_ids) + 1))
            else:
                rows.append(Row(request.num_computed, pending[:chunk], 0))
        return Batch.build(rows, self._target.profile.max_length, self._target.spec.sliding_window)

    def _commit(
        self,
        requests: Sequence[Request],
        drafts: Sequence[Draft],
        batch: Batch,
        output: StepOutput,
    ) -> list[NewTokens]:
        """Verify every row first: finishing a request moves others to new slots."""
        chunk = self._prefill_chunk(len(requests))
        results = []
        for b, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            if request.num_pending > chunk:  # the rest of the prompt follows
                request.num_computed += chunk
                continue
            try:
                verdict = self._verify(request, draft, output, batch.logits_start[b])
            except Exception as error:  # one row's trouble is not the others'
                request.error = _reason(error)
                results.append(NewTokens(request, ()))
                continue
            results.append(self._append(request, draft, verdict))
        for result in results:
            self._settle(result.request)
        return results

    def _verify(self, request: Request, draft: Draft, output: StepOutput, start: int) -> Verdict:
        def target_at(i: int) -> Distribution:
            return to_distribution(output.logits[start + i], request.params)

        return verify(draft, target_at, request.params.seed, len(request.token_ids))

    def _append(self, request: Request, draft: Draft, verdict: Verdict) -> NewTokens:
        """Add the verdict's tokens up to an end-of-sequence token or the limit."""
        kept = self._cut(request, verdict.token_ids)
        if request.stats.first_token_s:
            request.stats.num_decode_steps += 1
        else:
            request.stats.first_token_s = time.perf_counter()
            request.stats.num_first_tokens = len(kept)
        request.stats.acceptance.record(len(draft.token_ids), verdict.num_accepted)
        self._acceptance.record(len(draft.token_ids), verdict.num_accepted)
        self._num_output += len(kept)
        request.token_ids.extend(kept)
        request.num_computed = len(request.token_ids) - 1
        return NewTokens(request, kept)

    def _cut(self, request: Request, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        kept = token_ids[: request.num_left]
        if not request.params.ignore_eos:
            for i, token_id in enumerate(kept):
                if token_id in self._eos_token_ids:
                    return kept[: i + 1]
        return kept

    def _settle(self, request: Request) -> None:
        if request.error is not None:
            self._finish(request, FinishReason.ERROR)
        elif not request.params.ignore_eos and request.token_ids[-1] in self._eos_token_ids:
            self._finish(request, FinishReason.STOP)
        elif request.num_left == 0:
            self._finish(request, FinishReason.LENGTH)
        else:
            self._drafter.observe(request)

    def _fail(self, requests: Sequence[Request], reason: str) -> list[NewTokens]:
        for request in requests:
            request.error = reason
            self._finish(request, FinishReason.ERROR)
        return [NewTokens(request, ()) for request in requests]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.stats.finished_s = time.perf_counter()
        self._num_finished += 1
        self._scheduler.remove(request)
        self._drafter.release(request)

    def _move_slot(self, source: int, destination: int, length: int) -> None:
        self._target.move_slot(source, destination, length)
        self._drafter.move_slot(source, destination, length)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, SpecExportError) else f"{type(error).__name__}: {error}"
