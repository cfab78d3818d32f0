"""The loop: draft → run the target → verify → commit, over all running requests at once."""

import heapq
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import StepOutput, StepRunner
from specexport.errors import SpecExportError
from specexport.export.manifest import Acceptance, LosslessAcceptance
from specexport.runtime.batch import Batch, Row
from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, Progress
from specexport.runtime.lengths import DraftLengths, FixedLength, Outcome, RowState
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.lossy import LogitsAt, verify_lossy
from specexport.runtime.prefix_cache import PrefixCache
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.scheduler import Scheduler
from specexport.runtime.scoring import kept_logprobs, num_scored, score_prompt
from specexport.runtime.slots import CacheSlots
from specexport.runtime.stats import EngineStats, LoopCounters
from specexport.runtime.tree import ROOT, whole_tree
from specexport.runtime.turn import Turn, share_calls
from specexport.runtime.verify import Verdict, verify


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
    max_prefix_bytes: int = 0
    """Of cache entries that are kept for requests that begin alike."""


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
        self._slots = CacheSlots(target, drafter, PrefixCache(policy.max_prefix_bytes))
        # There is always room for a whole draft beside a text, so that where drafts begin, and
        # with it a seeded output, does not depend on the batch.
        step_tokens = max(target.profile.max_query - self._max_nodes, 1)
        self._scheduler = Scheduler(target.profile.max_slots, step_tokens, self._slots)
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._counters = LoopCounters()

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._scheduler.running or self._scheduler.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot."""
        return self._scheduler.num_waiting

    def submit(self, request: Request) -> None:
        """Queue a request; `step` will pick it up."""
        request.admit(self._eos_token_ids)
        self._scheduler.add(request)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.id, request))

    def cancel(self, request: Request) -> None:
        """End a request now, keeping what it has."""
        if request.finish_reason is None:
            self._finish(request, FinishReason.CANCELLED)

    def step(self) -> list[NewTokens]:
        """Run one step for the running requests; returns what each of them got.

        A row that fails (NaN logits) ends with `FinishReason.ERROR`, the others go on. When the
        engine itself fails, the requests of that call end so.
        """
        started = time.perf_counter()
        results = self._expire(started)
        turns = self._scheduler.next(self._max_nodes)
        for turn in turns:
            turn.request.stats.started_s = turn.request.stats.started_s or started
        try:
            turns = self._draft(turns)
        except Exception as error:  # whatever it is, the engine must go on
            results += _failed(turns, error)
            turns = []
        for group in share_calls([turn.width for turn in turns]):
            results += self._run_together([turns[i] for i in group])
        for result in results:
            if reason := self._reason_to_end(result.request):
                self._finish(result.request, reason)
        self._counters.record_step(started, sum(len(result.token_ids) for result in results))
        return results

    def stats(self) -> EngineStats:
        """A snapshot of the counters since the loop was made."""
        profile = self._target.profile
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            target_time_s=self._target.run_time_s,
            engine_time_s=self._target.run_time_s + self._drafter.engine_time_s,
            is_lossless=isinstance(self._acceptance_rule, LosslessAcceptance),
            num_cached_tokens=sum(r.num_computed for r in self._scheduler.running),
            max_cached_tokens=profile.max_slots * profile.max_length,
            prefixes=self._slots.stats(),
            **self._counters.snapshot(),
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` where slots, requests and what is kept disagree."""
        self._scheduler.check_integrity()
        self._slots.check_integrity()

    def close(self) -> None:
        """Free the engines."""
        self._drafter.close()
        self._target.close()

    def _expire(self, now_s: float) -> list[NewTokens]:
        """End the requests whose time is up."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, request = heapq.heappop(self._deadlines)
            if request.finish_reason is None:
                self._finish(request, FinishReason.TIMEOUT)
                expired.append(NewTokens(request, ()))
        return expired

    def _draft(self, turns: Sequence[Turn]) -> list[Turn]:
        """Give a draft to each request whose text this step computes to its end."""
        if not turns:
            return []
        started = time.perf_counter()
        rows = [self._row_state(turn) for turn in turns]
        drafts = self._found(turns, rows) if self._drafter.is_free else self._made(turns, rows)
        for turn in turns:
            self._slots.keep_blocks(turn.request)
        self._counters.draft_time_s += time.perf_counter() - started
        return [replace(turn, draft=draft) for turn, draft in zip(turns, drafts, strict=True)]

    def _row_state(self, turn: Turn) -> RowState:
        request = turn.request
        room = min(self._num_speculative_tokens, request.num_left - 1)
        return RowState(
            request.id,
            request.num_computed + turn.num_tokens,
            turn.num_tokens,
            turn.is_whole,
            max_depth=room if turn.is_whole else 0,
            num_behind=self._drafter.num_behind(request),
        )

    def _found(self, turns: Sequence[Turn], rows: Sequence[RowState]) -> list[Draft]:
        """Drafts that cost nothing to make: which pay is decided once they are there."""
        wanted = [DraftRequest(t.request, r.max_depth) for t, r in zip(turns, rows, strict=True)]
        drafts = self._drafter.propose(wanted)
        rows = [replace(r, max_depth=d.depth) for r, d in zip(rows, drafts, strict=True)]
        sizes = self._lengths.choose(rows)
        return [draft.cut(size.depth) for draft, size in zip(drafts, sizes, strict=True)]

    def _made(self, turns: Sequence[Turn], rows: Sequence[RowState]) -> list[Draft]:
        """Drafts of the sizes that promise to pay."""
        sizes = self._lengths.choose(rows)
        return self._drafter.propose(
            [
                DraftRequest(turn.request, size.depth, size.width)
                for turn, size in zip(turns, sizes, strict=True)
            ]
        )

    def _run_together(self, turns: Sequence[Turn]) -> list[NewTokens]:
        """One call of the target."""
        try:
            batch = self._build(turns)
            output = self._run(batch)
        except Exception as error:  # whatever it is, the engine must go on
            return _failed(turns, error)
        started = time.perf_counter()
        first = turns[0].request.slot
        results = []
        for turn in turns:
            b = turn.request.slot - first
            logits = output.logits[batch.logits_start[b] :]
            states = None if output.hidden_states is None else output.hidden_states[b]
            if result := self._commit(turn, logits, states):
                results.append(result)
        self._counters.verify_time_s += time.perf_counter() - started
        return results

    def _run(self, batch: Batch) -> StepOutput:
        before = self._target.run_time_s
        output = self._target.run(batch.step)
        num_rows, _, width, longest = batch.step.attention_mask.shape
        seconds = self._target.run_time_s - before
        self._lengths.observe_step(num_rows, width, longest, seconds)
        return output

    def _build(self, turns: Sequence[Turn]) -> Batch:
        """Rows from the first slot to the last; those between that have no turn are idle."""
        profile, first = self._target.profile, turns[0].request.slot
        rows = {turn.request.slot: _row(turn) for turn in turns}
        filled = [rows.get(s, Row.idle(profile.max_length)) for s in range(first, max(rows) + 1)]
        return Batch.build(filled, profile.max_length, self._target.spec.sliding_window, first)

    def _commit(
        self,
        turn: Turn,
        logits: NDArray[np.float32],  # [n, V], those of the row and of the rows after it
        states: NDArray[np.float32] | None,  # [Q, W]
    ) -> NewTokens | None:
        """Take in a row; what the request got, unless its text goes on or it failed."""
        request, result = turn.request, None
        try:
            if turn.is_whole:
                num_pending = turn.num_tokens
                logits = logits[score_prompt(request, logits, num_pending) :]
                verdict = self._verify(request, turn.draft, _after(logits))
                result = self._append(request, turn.draft, verdict, _after(logits))
            else:
                verdict = Verdict((), ())
                score_prompt(request, logits, turn.num_tokens)
                request.num_computed += turn.num_tokens
            if self._reason_to_end(request) is None:
                self._observe(request, turn.num_tokens, verdict, states)
        except Exception as error:  # one row's trouble is not the others'
            request.error = _reason(error)
            result = result or NewTokens(request, ())
        return result

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
        for acceptance in (request.stats.acceptance, self._counters.acceptance):
            acceptance.record(draft.depth, verdict.num_accepted, len(draft))
        self._counters.record_draft(draft.depth)
        self._lengths.observe(request.id, _outcome(draft, verdict))

    def _reason_to_end(self, request: Request) -> FinishReason | None:
        if request.finish_reason is not None:
            return None
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

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.stats.finished_s = time.perf_counter()
        self._counters.num_finished += 1
        self._slots.end(request)
        self._scheduler.remove(request)
        self._lengths.release(request.id)


def _row(turn: Turn) -> Row:
    request, draft = turn.request, turn.draft
    start = request.num_computed
    tokens = request.token_ids[start : start + turn.num_tokens]
    num_logits = num_scored(request, turn.num_tokens)
    if turn.is_whole:
        num_logits += 1 + len(draft)
    tree = whole_tree(len(request.token_ids), draft.parents) if draft else None
    return Row(start, [*tokens, *draft.token_ids], num_logits, tree)


def _outcome(draft: Draft, verdict: Verdict) -> Outcome:
    is_tree = len(draft) > draft.depth
    first = draft.num_first(verdict.path) if is_tree else None
    return Outcome(draft.depth, verdict.num_accepted, is_tree, first)


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


def _failed(turns: Sequence[Turn], error: Exception) -> list[NewTokens]:
    for turn in turns:
        turn.request.error = _reason(error)
    return [NewTokens(turn.request, ()) for turn in turns]
