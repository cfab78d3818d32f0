"""Steps whose tokens the decide graph chooses: which can be, and what it found.

It does what `verify` does with the same random numbers, in single precision. The host decides what
the graph cannot: grammars and allowed tokens, typical-p, lossy rules, log-probabilities of more
than the chosen tokens, and trees that were drawn at random. One such request, and the whole call is
decided on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specexport.engines.step import DecideOutput
from specexport.export.manifest import MOST_CANDIDATES, GraphSpec
from specexport.runtime.draft import Draft
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.request import Request
from specexport.runtime.scoring import num_scored
from specexport.runtime.tree import chain_parents
from specexport.runtime.turn import Turn
from specexport.runtime.verify import Verdict


@dataclass(frozen=True, slots=True)
class Decided:
    """What a step comes to for a request."""

    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the verdict's tokens, where the request wants them."""


def decidable(turns: Sequence[Turn], spec: GraphSpec) -> list[Turn]:
    """The turns that get tokens, in the order of their logits; none if one needs the host."""
    whole = sorted((turn for turn in turns if turn.is_whole), key=lambda turn: turn.request.slot)
    scores_prompt = any(num_scored(turn.request, turn.num_tokens) for turn in turns)
    suits = all(_is_plain(turn.request, spec) and _is_simple(turn.draft) for turn in whole)
    return whole if suits and not scores_prompt else []


def unpack(output: DecideOutput, turns: Sequence[Turn]) -> dict[int, Decided]:
    """By slot, what was decided of `turns`; the graph leaves a turn to the host now and then."""
    return {
        turn.request.slot: _decided(output, index, turn)
        for index, turn in enumerate(turns)
        if output.is_decided[index]
    }


def _decided(output: DecideOutput, index: int, turn: Turn) -> Decided:
    num_tokens = int(output.num_accepted[index]) + 1
    token_ids = output.token_ids[index, :num_tokens].tolist()
    path = (output.path[index, 1:num_tokens] - 1).tolist()  # the text is place 0
    verdict = Verdict(tuple(token_ids), tuple(path))
    if not turn.request.params.logprobs:
        return Decided(verdict)
    logprobs = output.logprobs[index, :num_tokens].tolist()
    return Decided(verdict, tuple(map(TokenLogprobs, token_ids, logprobs)))


def _is_plain(request: Request, spec: GraphSpec) -> bool:
    """Whether its options are such as the graph knows."""
    params, processor = request.params, request.processor
    is_short = not MOST_CANDIDATES < params.top_k < spec.vocab_size
    wants_more = params.logprobs and (params.top_logprobs or params.logprobs_of != "raw")
    return processor.is_sparse and is_short and params.typical_p == 1 and not wants_more


def _is_simple(draft: Draft) -> bool:
    """A chain, or a tree that was not drawn at random."""
    is_chain = draft.parents == chain_parents(len(draft))
    return is_chain or all(probs.is_one_hot for probs in draft.probs)
