"""What a step computed of a row → the request: verify, append, tell the drafter."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import StepRunner
from specexport.errors import SpecExportError
from specexport.export.methods import Acceptance, LosslessAcceptance
from specexport.runtime.deciding import Decided
from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, Progress
from specexport.runtime.lengths import DraftLengths, Outcome
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.lossy import LogitsAt, verify_lossy
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.scoring import kept_logprobs, score_prompt
from specexport.runtime.stats import LoopCounters
from specexport.runtime.tree import ROOT
from specexport.runtime.turn import Turn
from specexport.runtime.verify import Verdict, verify


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one step added to a request; the last of a request has its finish reason set."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the tokens, where the request wants them."""


class Committer:
    """Takes in the rows of a step."""

    def __init__(
        self,
        target: StepRunner,
        drafter: Drafter,
        acceptance: Acceptance,
        lengths: DraftLengths,
        counters: LoopCounters,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._acceptance, self._lengths, self._counters = acceptance, lengths, counters

    def commit(
        self,
        turn: Turn,
        logits: NDArray[np.float32],  # [n, V], those of the row and of the rows after it
        states: NDArray[np.float32] | None,  # [Q, W]
        decided: Decided | None = None,
    ) -> NewTokens | None:
        """Take in a row; what the request got, unless its text goes on or it failed.

        What the engine has decided needs no logits.
        """
        request, result = turn.request, None
        try:
            if turn.is_whole:
                num_pending = turn.num_tokens
                logits = logits[score_prompt(request, logits, num_pending) :]
                decided = decided or self._decide(request, turn.draft, _after(logits))
                verdict = decided.verdict
                result = self._append(request, turn.draft, decided)
            else:
                verdict = Verdict((), ())
                score_prompt(request, logits, turn.num_tokens)
                request.num_computed += turn.num_tokens
            if reason_to_end(request) is None:
                self._observe(request, turn.num_tokens, verdict, states)
        except Exception as error:  # one row's trouble is not the others'
            request.error = _reason(error)
            result = result or NewTokens(request, ())
        return result

    def _decide(self, request: Request, draft: Draft, logits_at: LogitsAt) -> Decided:
        verdict = self._verify(request, draft, logits_at)
        logprobs = kept_logprobs(request, draft, verdict.path, verdict.token_ids, logits_at)
        return Decided(verdict, logprobs)

    def _verify(self, request: Request, draft: Draft, logits_at: LogitsAt) -> Verdict:
        processor = request.processor

        def target_at(node: int) -> Distribution:
            return processor.distribution(logits_at(node), draft.path(node))

        rule, position = self._acceptance, len(request.token_ids)
        if isinstance(rule, LosslessAcceptance):
            return verify(draft, target_at, request.params.seed, position)
        return verify_lossy(rule, draft, logits_at, processor, position)

    def _append(self, request: Request, draft: Draft, decided: Decided) -> NewTokens:
        """Add the verdict's tokens up to the one that ends the output, or the limit."""
        verdict = decided.verdict
        kept = _cut(request, verdict.token_ids)
        if verdict.path != tuple(range(verdict.num_accepted)):
            self._target.compact(request.slot, len(request.token_ids), verdict.path)
        request.token_ids.extend(kept)
        request.num_computed = len(request.token_ids) - 1
        request.processor.commit(kept)
        tokens = kept + self._force(request)
        self._count(request, draft, verdict, len(tokens))
        return NewTokens(request, tokens, decided.logprobs[: len(kept)])

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


def reason_to_end(request: Request) -> FinishReason | None:
    """Why a request that has not ended yet ends now; None where it goes on."""
    if request.finish_reason is not None:
        return None
    if request.error is not None:
        return FinishReason.ERROR
    if request.stopped_by is not None or request.processor.is_complete:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.num_left == 0 else None


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


def failed(turns: Sequence[Turn], error: Exception) -> list[NewTokens]:
    """The end of all requests of a step that failed."""
    for turn in turns:
        turn.request.error = _reason(error)
    return [NewTokens(turn.request, ()) for turn in turns]
