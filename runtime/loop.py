"""The loop: draft → run the target → verify → commit, over all running requests at once."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import StepOutput, StepRunner
from specexport.errors import SpecExportError
from specexport.export.manifest import Acceptance, LosslessAcceptance
from specexport.runtime.batch import Batch, Row
from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, Progress
from specexport.runtime.lengths import DraftLengths, FixedLength, RowState
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.lossy import LogitsAt, verify_lossy
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.scheduler import Scheduler
from specexport.runtime.scoring import (
    MOST_PROMPT_ROWS,
    kept_logprobs,
    num_scored,
    score_prompt,
)
from specexport.runtime.stats import AcceptanceStats, EngineStats
from specexport.runtime.tree import ROOT, whole_tree
from specexport.runtime.verify import Verdict, verify

# However many rows there are, each may compute this part of a whole step's tokens.
_LEAST_PREFILL_SHARE = 8


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one step added to a request; the last of a request has its finish reason set."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the tokens, where the request wants them."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a loop speculates, beyond the limit of its drafts' depth."""

    max_nodes: int = 0
    """Most nodes of a tree, where that is more than its depth."""
    acceptance: Acceptance = LosslessAcceptance()
    lengths: DraftLengths | None = None
    """Decides how deep each draft is; None: as deep as the limit."""


class SpeculativeLoop:
    """Drives one target and one drafter. Not thread-safe."""

    def __init__(
        self,
        target: StepRunner,
        drafter: Drafter,
        num_speculative_tokens: int,
        eos_token_ids: Collection[int],
        policy: Policy = Policy(),
    ) -> None:
        """`num_speculative_tokens` is the limit K of a draft's depth; 0 decodes plainly."""
        self._lengths = policy.lengths or FixedLength(num_speculative_tokens)
        self._acceptance_rule = policy.acceptance
        self._target, self._drafter = target, drafter
        self._num_speculative_tokens = num_speculative_tokens
        self._max_nodes = max(num_speculative_tokens, policy.max_nodes)
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
        request.admit(self._eos_token_ids)
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
            output = self._run(batch)
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
            is_lossless=isinstance(self._acceptance_rule, LosslessAcceptance),
            engine_time_s=self._target.run_time_s + self._drafter.engine_time_s,
        )

    def close(self) -> None:
        """Free the engines."""
        self._drafter.close()
        self._target.close()

    def _run(self, batch: Batch) -> StepOutput:
        before = self._target.run_time_s
        output = self._target.run(batch.step)
        num_rows, _, width, longest = batch.step.attention_mask.shape
        seconds = self._target.run_time_s - before
        self._lengths.observe_step(num_rows, width, longest, seconds)
        return output

    def _prefill_chunk(self, num_rows: int) -> int:
        """Most pending tokens of a row in one step: all rows share one budget.

        There is always room for a whole draft beside them, so that where drafts begin, and with
        it a seeded output, does not depend on the batch.
        """
        max_query = self._target.profile.max_query
        least = max((max_query - self._max_nodes) // _LEAST_PREFILL_SHARE, 1)
        return max(max_query // num_rows - self._max_nodes, least)

    def _chunk(self, request: Request, num_rows: int) -> int:
        """Most pending tokens of this request in one step."""
        chunk = self._prefill_chunk(num_rows)
        return min(chunk, MOST_PROMPT_ROWS) if request.params.prompt_logprobs else chunk

    def _draft(self, requests: Sequence[Request]) -> list[Draft]:
        """A draft for each request whose pending tokens all fit this step; empty for the others."""
        started = time.perf_counter()
        rows = []
        for r in requests:
            chunk = self._chunk(r, len(requests))
            room = min(self._num_speculative_tokens, r.num_left - 1)
            max_draft = room if r.num_pending <= chunk else 0
            rows.append(RowState(r.id, len(r.token_ids), min(r.num_pending, chunk), max_draft))
        lengths = self._lengths.choose(rows)
        wanted = [DraftRequest(r, length) for r, length in zip(requests, lengths, strict=True)]
        drafts = self._drafter.propose(wanted)
        self._draft_time_s += time.perf_counter() - started
        return drafts

    def _build(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> Batch:
        rows = []
        for request, draft in zip(requests, drafts, strict=True):
            chunk = self._chunk(request, len(requests))
            pending = request.token_ids[request.num_computed :]
            if len(pending) <= chunk:
                num_logits = num_scored(request, len(pending) - 1) + 1 + len(draft)
                tokens = [*pending, *draft.token_ids]
                tree = whole_tree(len(request.token_ids), draft.parents) if draft else None
                rows.append(Row(request.num_computed, tokens, num_logits, tree))
            else:
                num_logits = num_scored(request, chunk)
                rows.append(Row(request.num_computed, pending[:chunk], num_logits))
        return Batch.build(rows, self._target.profile.max_length, self._target.spec.sliding_window)

    def _commit(
        self,
        requests: Sequence[Request],
        drafts: Sequence[Draft],
        batch: Batch,
        output: StepOutput,
    ) -> list[NewTokens]:
        """Verify every row first: finishing a request moves others to new slots."""
        results = []
        for b, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            states = None if output.hidden_states is None else output.hidden_states[b]
            logits = output.logits[batch.logits_start[b] :]
            chunk, num_pending = self._chunk(request, len(requests)), request.num_pending
            try:
                if num_pending > chunk:  # the rest of the prompt follows
                    score_prompt(request, logits, chunk)
                    request.num_computed += chunk
                    self._observe(request, chunk, Verdict((), ()), states)
                    continue
                logits = logits[score_prompt(request, logits, num_pending - 1) :]
                verdict = self._verify(request, draft, _after(logits))
                result = self._append(request, draft, verdict, _after(logits))
                results.append(result)
            except Exception as error:  # one row's trouble is not the others'
                request.error = _reason(error)
                results.append(NewTokens(request, ()))
                continue
            if self._reason_to_end(request) is None:
                self._observe(request, num_pending, verdict, states)
        for result in results:
            if reason := self._reason_to_end(result.request):
                self._finish(result.request, reason)
        return results

    def _verify(self, request: Request, draft: Draft, logits_at: LogitsAt) -> Verdict:
        processor = request.processor

        def target_at(node: int) -> Distribution:
            return processor.distribution(logits_at(node), draft.path(node))

        rule, position = self._acceptance_rule, len(request.token_ids)
        if isinstance(rule, LosslessAcceptance):
            return verify(draft, target_at, request.params.seed, position)
        return verify_lossy(rule, draft, logits_at, processor, position)

    def _append(
        self, request: Request, draft: Draft, verdict: Verdict, logits_at: LogitsAt
    ) -> NewTokens:
        """Add the verdict's tokens up to the one that ends the output, or the limit."""
        kept = _cut(request, verdict.token_ids)
        logprobs = kept_logprobs(request, draft, verdict.path, kept, logits_at)
        if verdict.path != tuple(range(verdict.num_accepted)):
            self._target.compact(request.slot, len(request.token_ids), verdict.path)
        request.token_ids.extend(kept)
        request.num_computed = len(request.token_ids) - 1
        request.processor.commit(kept)
        tokens = kept + self._force(request)
        self._count(request, draft, verdict, len(tokens))
        return NewTokens(request, tokens, logprobs)

    def _force(self, request: Request) -> tuple[int, ...]:
        """Append what alone may come next; the target will read it as it reads a prompt."""
        forced = request.processor.forced(request.num_left)
        for token_id in forced:
            request.ends_with(token_id)
        request.processor.commit(forced)
        request.token_ids.extend(forced)
        return forced

    def _count(self, request: Request, draft: Draft, verdict: Verdict, num_tokens: int) -> None:
        """Count a step that gave `num_tokens`."""
        if request.stats.first_token_s:
            request.stats.num_decode_steps += 1
        else:
            request.stats.first_token_s = time.perf_counter()
            request.stats.num_first_tokens = num_tokens
        for acceptance in (request.stats.acceptance, self._acceptance):
            acceptance.record(draft.depth, verdict.num_accepted, len(draft))
        self._lengths.observe(request.id, draft.depth, verdict.num_accepted)
        self._num_output += num_tokens

    def _reason_to_end(self, request: Request) -> FinishReason | None:
        if request.error is not None:
            return FinishReason.ERROR
        if request.stopped_by is not None or request.processor.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_left == 0 else None

    def _observe(
        self,
        request: Request,
        num_pending: int,
        verdict: Verdict,
        hidden_states: NDArray[np.float32] | None,  # [Q, W]
    ) -> None:
        """Tell the drafter what is computed now; of a row's nodes, the accepted ones are."""
        if hidden_states is not None:
            queries = [*range(num_pending), *(num_pending + node for node in verdict.path)]
            hidden_states = hidden_states[queries]  # a copy: the engine's buffer will change
        self._drafter.observe(request, Progress(verdict.path, hidden_states))

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
        self._lengths.release(request.id)

    def _move_slot(self, source: int, destination: int, length: int) -> None:
        self._target.move_slot(source, destination, length)
        self._drafter.move_slot(source, destination, length)


def _after(logits: NDArray[np.float32]) -> LogitsAt:  # [n, V]
    """Rows of logits by node: the one after the text comes first."""

    def logits_at(node: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = logits[node - ROOT]
        return row

    return logits_at


def _cut(request: Request, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    kept = token_ids[: request.num_left]
    for i, token_id in enumerate(kept):
        if request.ends_with(token_id) or request.processor.completes(kept[: i + 1]):
            return kept[: i + 1]
    return kept


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, SpecExportError) else f"{type(error).__name__}: {error}"
