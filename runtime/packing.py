"""Turns → what the decide graph reads (`export/decide/graph.py` has the table)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specexport.engines.step import DecideInput
from specexport.export.manifest import RACE_BLOCK, GraphSpec, max_adjusted
from specexport.runtime.distribution import Distribution
from specexport.runtime.params import SamplingParams
from specexport.runtime.processing import Adjustments
from specexport.runtime.race import race_times
from specexport.runtime.random import Purpose, uniform
from specexport.runtime.tree import ROOT, chain_parents, tree_shape
from specexport.runtime.turn import Turn

Floats = NDArray[np.float32]
_NO_TOP_K = 2**31 - 1
_NO_PROPOSAL = Distribution(np.zeros(1, dtype=np.int64), np.zeros(1))
_COLDEST, _HOTTEST = 1e-30, 1e30  # further out nothing changes, and single precision ends
_LARGEST_UNIFORM = 1 - 2.0**-24  # in single precision: none may be rounded up to 1


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of logits: that after the text, or after a node of the draft."""

    params: SamplingParams
    adjustments: Adjustments
    times: tuple[Floats, Floats]
    proposal: Distribution = _NO_PROPOSAL
    """What the drafted token after it was drawn from, where it was drawn at random."""
    proposed_id: int = 0
    accept_uniform: float = 0.0


def pack(turns: Sequence[Turn], spec: GraphSpec) -> DecideInput | None:
    """For turns whose rows of logits follow one another, the first at row 0.

    None where options change more logits than the graph may be built for.
    """
    rows = [row for turn in turns for row in _rows(turn, -(-spec.vocab_size // RACE_BLOCK))]
    most = max_adjusted(spec.vocab_size, spec.max_length)
    if any(len(row.adjustments.token_ids) > most for row in rows):
        return None
    params, adjustments = [row.params for row in rows], [row.adjustments for row in rows]
    is_greedy = np.array([p.temperature == 0 for p in params])
    temperature = np.clip([p.temperature for p in params], _COLDEST, _HOTTEST)
    proposed_prob = [row.proposal.prob(row.proposed_id) for row in rows]
    # Greedy is the likeliest token alone: a top-p of 0.
    return DecideInput(
        temperature=_floats(np.where(is_greedy, 1.0, temperature)),
        top_k=np.array([min(p.top_k or _NO_TOP_K, _NO_TOP_K) for p in params], dtype=np.int64),
        top_p=_floats(np.where(is_greedy, 0.0, [p.top_p for p in params])),
        min_p=_floats([p.min_p for p in params]),
        adjusted_ids=_filled([a.token_ids for a in adjustments], 0),
        adjusted_bias=_filled([a.bias for a in adjustments], 0.0),
        adjusted_repetition=_filled([a.repetition for a in adjustments], 1.0),
        adjusted_penalty=_filled([a.penalty for a in adjustments], 0.0),
        block_times=np.stack([row.times[0] for row in rows]),
        token_times=np.stack([row.times[1] for row in rows]),
        proposed_id=np.array([row.proposed_id for row in rows], dtype=np.int64),
        proposed_prob=_floats(proposed_prob),
        accept_uniform=_floats(np.minimum([row.accept_uniform for row in rows], _LARGEST_UNIFORM)),
        proposal_ids=_filled([row.proposal.token_ids for row in rows], 0),
        proposal_probs=_filled([_floats(row.proposal.probs) for row in rows], 0.0),
        **_trees(turns),
    )


def _rows(turn: Turn, num_blocks: int) -> Iterator[_Row]:
    """One for the text, then one for each node of the draft."""
    request, draft = turn.request, turn.draft
    params, processor = request.params, request.processor
    positions = len(request.token_ids) + np.concatenate([[0], tree_shape(draft.parents).depths + 1])
    times = {p: _times(params, p, num_blocks) for p in set(positions.tolist())}
    is_chain = draft.parents == chain_parents(len(draft))
    for node, position in enumerate(positions.tolist(), start=ROOT):
        adjustments = processor.adjustments(draft.path(node))
        row = _Row(params, adjustments, times[position])
        child = node + 1
        if is_chain and child < len(draft) and not draft.probs[child].is_one_hot:
            chance = uniform(params.seed, position, Purpose.ACCEPT)
            row = replace(
                row,
                proposal=draft.probs[child],
                proposed_id=draft.token_ids[child],
                accept_uniform=chance,
            )
        yield row


def _times(params: SamplingParams, position: int, num_blocks: int) -> tuple[Floats, Floats]:
    """Of the race; one runner alone needs none."""
    if params.temperature == 0:
        return np.ones(num_blocks, dtype=np.float32), np.ones(RACE_BLOCK, dtype=np.float32)
    blocks, tokens = race_times(params.seed, position, num_blocks)
    return _floats(blocks), _floats(tokens)


def _trees(turns: Sequence[Turn]) -> dict[str, Any]:
    """Each turn's places: the text, then its nodes; some are not used where others have more."""
    num_places = 1 + max(len(turn.draft) for turn in turns)
    shape = (len(turns), num_places)
    rows, ids, parents = np.zeros((3, *shape), dtype=np.int64)
    ids -= 1
    ancestors = np.tile(np.eye(num_places, dtype=np.bool_), (len(turns), 1, 1))
    ancestors[:, 0, 0] = False
    start = 0
    for i, turn in enumerate(turns):
        draft, places = turn.draft, 1 + len(turn.draft)
        rows[i, :places] = start + np.arange(places)
        ids[i, 1:places] = draft.token_ids
        parents[i, 1:places] = np.array(draft.parents, dtype=np.int64) - ROOT
        ancestors[i, 1:places, 1:places] = tree_shape(draft.parents).sees
        start += places
    return {"node_rows": rows, "node_ids": ids, "node_parents": parents, "ancestors": ancestors}


def _filled(rows: Sequence[NDArray[Any]], none: float) -> NDArray[Any]:
    """Rows of different lengths as [N, longest]: shorter ones end with their first, as often."""
    width = max(1, *(len(row) for row in rows))
    return np.stack([_widened(row, none, width) for row in rows])


def _widened(row: NDArray[Any], none: float, width: int) -> NDArray[Any]:
    found = np.full(width, row[0] if len(row) else none, dtype=row.dtype)
    found[: len(row)] = row
    return found


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float32)
