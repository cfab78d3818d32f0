"""The loop: draft → run the target → verify → commit, over all running requests at once."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from specexport.engines.step import StepOutput, StepRunner
from specexport.export.methods import Acceptance, LosslessAcceptance
from specexport.runtime.batch import Batch, Row
from specexport.runtime.commit import Committer, NewTokens, failed, reason_to_end
from specexport.runtime.deciding import decidable, unpack
from specexport.runtime.drafters.base import Drafter
from specexport.runtime.lengths import DraftLengths, FixedLength
from specexport.runtime.packing import pack
from specexport.runtime.prefix_cache import PrefixCache
from specexport.runtime.proposer import Proposer
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.request_queue import RequestQueue
from specexport.runtime.scheduler import Scheduler
from specexport.runtime.scoring import num_scored
from specexport.runtime.slots import CacheSlots
from specexport.runtime.stats import EngineStats, LoopCounters
from specexport.runtime.tree import whole_tree
from specexport.runtime.turn import Turn, share_calls


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
        self._acceptance = policy.acceptance
        self._target, self._drafter = target, drafter
        max_nodes = max(num_speculative_tokens, policy.max_nodes)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._slots = CacheSlots(target, drafter, PrefixCache(policy.max_prefix_bytes))
        # There is always room for a whole draft beside a text, so that where drafts begin, and
        # with it a seeded output, does not depend on the batch.
        step_tokens = max(target.profile.max_query - max_nodes, 1)
        self._scheduler = Scheduler(target.profile.max_slots, step_tokens, self._slots)
        self._num_drafted = 0  # tokens of the last step's drafts
        self._deadlines = RequestQueue()
        self._counters = LoopCounters()
        self._proposer = Proposer(drafter, self._lengths, num_speculative_tokens)
        self._committer = Committer(
            target, drafter, policy.acceptance, self._lengths, self._counters
        )

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
            self._deadlines.push(request.deadline_s, request)

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
        turns = self._scheduler.next(self._num_drafted)
        for turn in turns:
            turn.request.stats.started_s = turn.request.stats.started_s or started
        try:
            turns = self._draft(turns)
        except Exception as error:  # whatever it is, the engine must go on
            results += failed(turns, error)
            turns = []
        self._num_drafted = sum(len(turn.draft) for turn in turns)
        for group in share_calls([turn.width for turn in turns]):
            results += self._run_together([turns[i] for i in group])
        for result in results:
            if reason := reason_to_end(result.request):
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
            is_lossless=isinstance(self._acceptance, LosslessAcceptance),
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
        while (first := self._deadlines.first()) and first[0] <= now_s:
            _, request = first
            self._finish(request, FinishReason.TIMEOUT)
            expired.append(NewTokens(request, ()))
        return expired

    def _draft(self, turns: Sequence[Turn]) -> list[Turn]:
        """Give a draft to each request whose text this step computes to its end."""
        if not turns:
            return []
        started = time.perf_counter()
        drafts = self._proposer.propose(turns)
        for turn in turns:
            self._slots.keep_blocks(turn.request)
        self._counters.draft_time_s += time.perf_counter() - started
        return [replace(turn, draft=draft) for turn, draft in zip(turns, drafts, strict=True)]

    def _run_together(self, turns: Sequence[Turn]) -> list[NewTokens]:
        """One call of the target."""
        try:
            batch = self._build(turns)
            asked = self._decidable(turns)
            decide = pack(asked, self._target.spec) if asked else None
            output = self._run(replace(batch, step=replace(batch.step, decide=decide)))
            decided = unpack(output.decided, asked) if output.decided else {}
            is_partly = output.decided is not None and len(decided) < len(asked)
            all_logits = self._target.read_logits() if is_partly else output.logits
        except Exception as error:  # whatever it is, the engine must go on
            return failed(turns, error)
        started = time.perf_counter()
        first = turns[0].request.slot
        results = []
        for turn in turns:
            slot = turn.request.slot
            logits = all_logits[batch.logits_start[slot - first] :]
            states = None if output.hidden_states is None else output.hidden_states[slot - first]
            if result := self._committer.commit(turn, logits, states, decided.get(slot)):
                results.append(result)
        self._counters.verify_time_s += time.perf_counter() - started
        return results

    def _decidable(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of a call that the engine decides; none where the host has to."""
        is_lossless = isinstance(self._acceptance, LosslessAcceptance)
        can_decide = self._target.can_decide and is_lossless
        return decidable(turns, self._target.spec) if can_decide else []

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

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.stats.finished_s = time.perf_counter()
        self._counters.num_finished += 1
        self._slots.end(request)
        self._scheduler.remove(request)
        self._deadlines.remove(request)
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
