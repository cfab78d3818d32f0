"""Drafters that are models themselves: a smaller model, EAGLE, MTP. They differ in one shift.

A draft model reads the text: its row i holds token i. A head's row i holds token i + 1 and the
target's hidden state at i, so it has one row less. Both predict the token after the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specexport.engines.step import FunctionRunner, StepRunner
from specexport.runtime.batch import Batch, Row
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import DraftRequest, Progress
from specexport.runtime.drafters.constrained import draftable
from specexport.runtime.growth import Grower, Growth
from specexport.runtime.picking import MakePicker, drawn
from specexport.runtime.prefix_cache import Piece
from specexport.runtime.request import Request
from specexport.runtime.token_map import TokenMap
from specexport.runtime.tree import ROOT, Branches
from specexport.runtime.turn import share_calls

Floats = NDArray[np.float32]
_LEFT_OUT = -1
_MOST_BEHIND = 64
"""Hidden states that are kept for a request which wants no drafts before its rows are computed."""


@dataclass(slots=True)
class _State:
    """Of one request: rows [0, num_computed) of its text are in the drafter's cache."""

    num_computed: int = 0
    pending: list[Floats] = field(default_factory=list)  # [m, W] each
    """The target's taps for the rows after those; heads alone."""
    computed_nodes: list[int] = field(default_factory=list)
    """Nodes of the last draft, in the order of their cache entries after the text's rows."""

    @property
    def num_pending(self) -> int:
        return sum(len(taps) for taps in self.pending)

    def take(self, size: int) -> Floats:
        """The next `size` pending taps."""
        taps = np.concatenate(self.pending) if len(self.pending) > 1 else self.pending[0]
        self.pending = [taps[size:]]
        self.num_computed += size
        return taps[:size]


@dataclass(frozen=True, slots=True)
class _Output:
    """Of one step of the model; the arrays are valid until the next."""

    start: dict[int, int]
    """Where each slot's rows begin."""
    logits: Floats  # [N, V]
    states: Floats | None  # [N, H], heads alone


@dataclass(slots=True)
class _Drafting:
    """A draft that grows below the text of one request."""

    request: Request
    growth: Growth
    states: dict[int, Floats] = field(default_factory=dict)  # [H], by the node that gave it
    computed: list[int] = field(default_factory=list)


class ModelDrafter:
    """Runs a model over the same slots as the target, in a cache of its own.

    It catches up on what its text has gained, so prefill, bonus token and rejection are one case;
    then it computes the draft level by level. Past the end of its context it proposes nothing.
    """

    def __init__(
        self,
        runner: StepRunner,
        grower: Grower,
        token_map: TokenMap,
        *,
        is_head: bool = False,
        fuse: FunctionRunner | None = None,
        make_picker: MakePicker = drawn,
    ) -> None:
        """A head takes hidden states; `fuse` makes its features of the target's taps.

        `make_picker` makes what chooses a request's tokens.
        """
        self._make_picker = make_picker
        self._runner, self._grower, self._token_map = runner, grower, token_map
        self._narrow: dict[int, Grower] = {}  # by width
        self._is_head, self._fuse = is_head, fuse
        self._shift = 1 if is_head else 0  # row i holds token i + shift
        self._states: dict[int, _State] = {}

    @property
    def is_free(self) -> bool:
        """The model takes time."""
        return False

    @property
    def engine_time_s(self) -> float:
        """Seconds inside the inference library."""
        return self._runner.run_time_s + (self._fuse.run_time_s if self._fuse else 0.0)

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """Catch up, then grow a draft for each."""
        depths = [self._depth(w) for w in wanted]
        root = self._catch_up(
            [
                w.request
                for w, depth in zip(wanted, depths, strict=True)
                if depth or self._state(w.request).num_pending >= _MOST_BEHIND
            ]
        )
        drafting = [
            _Drafting(w.request, self._start(w, depth), {ROOT: root[w.request.id][1]})
            for w, depth in zip(wanted, depths, strict=True)
            if depth
        ]
        for d in drafting:
            d.growth.grow([self._masked(d, ROOT, root[d.request.id][0])])
        while active := [d for d in drafting if d.growth.frontier]:
            self._level(active)
        drafts = {d.request.id: self._draft(d) for d in drafting}
        return [drafts.get(w.request.id, Draft()) for w in wanted]

    def observe(self, request: Request, progress: Progress) -> None:
        """Take in the target's hidden states, or keep the entries of accepted tokens."""
        state = self._state(request)
        if self._is_head:
            assert progress.hidden_states is not None
            state.pending.append(progress.hidden_states)
        else:
            kept = self._keep(request, state, progress.path)
            state.num_computed = min(state.num_computed + kept, len(request.token_ids) - 1)
        state.computed_nodes = []

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Move the cache with the request."""
        self._runner.move_slot(source, destination, min(length, self._runner.profile.max_length))

    def release(self, request: Request) -> None:
        """Forget the request."""
        self._states.pop(request.id, None)

    def num_behind(self, request: Request) -> int:
        """Rows of its text that are not in the drafter's cache."""
        state = self._state(request)
        known = state.num_pending if self._is_head else len(request.token_ids) - state.num_computed
        return min(known, self._runner.profile.max_length)

    def num_reusable(self, request: Request) -> int:
        """A head has one row less than tokens; a draft model catches up without being asked."""
        if not self._is_head:
            return request.num_computed
        return min(request.num_computed, self._state(request).num_computed + self._shift)

    def save(self, request: Request, start: int, stop: int) -> Floats | None:
        """The rows that depend on tokens [start, stop) and those before; None if it is behind."""
        last = stop - self._shift
        if self._state(request).num_computed < last:
            return None
        return self._runner.read_cache(request.slot, max(start - self._shift, 0), last)

    def restore(self, request: Request, pieces: Sequence[Piece], limit: int) -> int:
        """Put rows back, but the last one of the text: drafts grow from what it gives.

        A head's target must go on from its last row, for the hidden states.
        """
        state = self._state(request)
        last = min(limit + self._shift, len(request.token_ids) - 1)
        for piece in pieces:
            size = min(piece.stop, last) - self._shift - state.num_computed
            if piece.entries.drafter is None or size < 0:
                break
            entries = piece.entries.drafter[..., :size, :]
            self._runner.write_cache(request.slot, state.num_computed, entries)
            state.num_computed += size
        return state.num_computed if self._is_head else min(pieces[-1].stop, limit)

    def pause(self, request: Request) -> None:
        """Forget the request; of a new slot it knows nothing."""
        self._states.pop(request.id, None)

    def close(self) -> None:
        """Free the engines."""
        self._runner.close()
        if self._fuse:
            self._fuse.close()

    def _state(self, request: Request) -> _State:
        return self._states.setdefault(request.id, _State())

    def _depth(self, wanted: DraftRequest) -> int:
        """Levels of the draft; none past the context, nor before or after what is not known."""
        if not wanted.max_tokens:
            return 0
        state, tokens = self._state(wanted.request), wanted.request.token_ids
        num_rows = len(tokens) - self._shift
        if self._is_head:  # from the second token on: a chunked prompt must make no difference
            is_known = wanted.request.num_output > 0
            is_known &= num_rows <= state.num_computed + state.num_pending
        else:
            is_known = max(tokens[state.num_computed :]) < self._runner.spec.vocab_size
        room = self._runner.profile.max_length - num_rows
        depth = self._narrowed(wanted.max_width).depth
        return max(min(wanted.max_tokens, depth, room), 0) if is_known else 0

    def _start(self, wanted: DraftRequest, depth: int) -> Growth:
        picker = self._make_picker(wanted.request.params, self._token_map)
        grower = self._narrowed(wanted.max_width)
        return grower.start(picker, len(wanted.request.token_ids), depth)

    def _narrowed(self, width: int) -> Grower:
        if width >= self._grower.width:
            return self._grower
        if width not in self._narrow:
            self._narrow[width] = self._grower.narrowed(width)
        return self._narrow[width]

    def _draft(self, d: _Drafting) -> Draft:
        """The draft, whose nodes are numbered anew: those that were computed, by their entries."""
        kept = d.growth.kept()
        number = {node: i for i, node in enumerate(kept)}
        self._state(d.request).computed_nodes = [number.get(node, _LEFT_OUT) for node in d.computed]
        return d.growth.nodes.draft(kept)

    def _catch_up(self, requests: Sequence[Request]) -> dict[int, tuple[Floats, Floats]]:
        """Compute all rows that can be; the logits and the state of each request's last one."""
        found: dict[int, tuple[Floats, Floats]] = {}
        todo = {r.id: self._num_ready(r) for r in requests}
        while active := [r for r in requests if todo[r.id]]:
            left = self._runner.profile.max_query
            sizes = {}
            for request in active:
                sizes[request] = min(todo[request.id], left)
                left -= sizes[request]
                todo[request.id] -= sizes[request]
            chosen = [request for request, size in sizes.items() if size]
            for group in share_calls([sizes[request] for request in chosen]):
                rows = {chosen[i]: self._text_row(chosen[i], sizes[chosen[i]]) for i in group}
                found |= self._compute(rows)
        return found

    def _compute(self, rows: dict[Request, Row]) -> dict[int, tuple[Floats, Floats]]:
        """Run rows of text; logits and state of the last of each, by the request's id."""
        output = self._run({request.slot: row for request, row in rows.items()})
        found = {}
        for request in rows:
            last = output.start[request.slot]
            states = output.logits if output.states is None else output.states
            found[request.id] = (output.logits[last].copy(), states[last].copy())
        return found

    def _num_ready(self, request: Request) -> int:
        """Rows that can be computed now."""
        state, room = self._state(request), self._runner.profile.max_length
        if state.num_computed >= room:
            state.pending.clear()
        known = state.num_pending if self._is_head else len(request.token_ids) - state.num_computed
        return max(min(known, room - state.num_computed), 0)

    def _text_row(self, request: Request, size: int) -> Row:
        """The next `size` rows of the text, which count as computed from now on."""
        state = self._state(request)
        start, features = state.num_computed, None
        if self._is_head:
            taps = state.take(size)
            features = self._fuse.run(taps) if self._fuse else taps
        else:
            state.num_computed += size
        first = start + self._shift
        return Row(start, request.token_ids[first : first + size], 1, hidden_states=features)

    def _level(self, active: Sequence[_Drafting]) -> None:
        """Compute the frontier of each draft and let it grow."""
        rows = {d.request.slot: self._level_row(d) for d in active}
        output = self._run(rows)
        for d in active:
            start, frontier = output.start[d.request.slot], d.growth.frontier
            if (states := output.states) is not None:
                d.states |= {node: states[start + i].copy() for i, node in enumerate(frontier)}
            d.growth.grow(
                [self._masked(d, node, output.logits[start + i]) for i, node in enumerate(frontier)]
            )

    def _masked(self, d: _Drafting, node: int, logits: Floats) -> Floats:
        """Logits after a node, -inf for what the request's constraint forbids there.

        So what is drawn was drawn from the distribution that the draft names.
        """
        if d.request.constraint is None:
            return logits
        allowed = draftable(d.request.constraint, d.growth.nodes.path(node))
        if allowed is None:
            return np.full_like(logits, -np.inf)
        return self._token_map.masked(logits, allowed)

    def _level_row(self, d: _Drafting) -> Row:
        """The frontier, written after the nodes that were computed before."""
        state, nodes, frontier = self._state(d.request), d.growth.nodes, d.growth.frontier
        start = state.num_computed + len(d.computed)
        d.computed += frontier
        branches = _branches(state.num_computed, nodes.parents, d.computed, len(frontier))
        features = None
        if self._is_head:
            features = np.stack([d.states[nodes.parents[node]] for node in frontier])
        tokens = [nodes.token_ids[node] for node in frontier]
        return Row(start, tokens, len(frontier), branches, features)

    def _run(self, rows: dict[int, Row]) -> _Output:
        """One step over the given slots; those between them are idle."""
        max_length, first = self._runner.profile.max_length, min(rows)
        filled = [rows.get(slot, Row.idle(max_length)) for slot in range(first, max(rows) + 1)]
        batch = Batch.build(filled, max_length, self._runner.spec.sliding_window, first)
        output = self._runner.run(batch.step)
        starts = {slot: batch.logits_start[slot - first] for slot in rows}
        return _Output(starts, output.logits, output.hidden_states)

    def _keep(self, request: Request, state: _State, path: Sequence[int]) -> int:
        """Make the entries of accepted nodes follow the text's; how many there are."""
        entries = []
        for node in path:
            if node not in state.computed_nodes:
                break
            entries.append(state.computed_nodes.index(node))
        if entries != list(range(len(entries))):
            self._runner.compact(request.slot, state.num_computed, entries)
        return len(entries)


def _branches(base: int, parents: Sequence[int], computed: Sequence[int], num: int) -> Branches:
    """The last `num` of the computed nodes, whose entries stand in the order of computing."""
    entries = {node: entry for entry, node in enumerate(computed)}
    depths = np.zeros(len(computed), dtype=np.int64)
    sees = np.zeros((len(computed), len(computed)), dtype=np.bool_)
    for node, entry in entries.items():
        sees[entry, entry] = True
        if parents[node] != ROOT:
            above = entries[parents[node]]
            sees[entry] |= sees[above]
            depths[entry] = depths[above] + 1
    return Branches(base, depths, sees[len(computed) - num :])
