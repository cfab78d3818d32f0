"""What goes into an engine and what comes out: one step of one graph.

Letters: B batch rows, Q query tokens, T longest valid length, N rows that get logits, V vocabulary,
H hidden size, W the width of a target's taps. Of decisions: R requests, M places in a request's
draft (the text and each node), P tokens whose logits options change, S tokens of a proposal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specexport.export.manifest import GraphSpec

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DecideInput:
    """What a target's decide graph reads besides the logits; fields are named as its inputs.

    No dimension is 0. docs/decide.md says what each input means and what stands for "none".
    """

    temperature: Floats  # [N]
    top_k: Ids  # [N]
    top_p: Floats  # [N]
    min_p: Floats  # [N]
    adjusted_ids: Ids  # [N, P]
    adjusted_bias: Floats  # [N, P]
    adjusted_repetition: Floats  # [N, P]
    adjusted_penalty: Floats  # [N, P]
    block_times: Floats  # [N, ceil(V / 64)]
    token_times: Floats  # [N, 64]
    proposed_id: Ids  # [N]
    proposed_prob: Floats  # [N]
    accept_uniform: Floats  # [N]
    proposal_ids: Ids  # [N, S]
    proposal_probs: Floats  # [N, S]
    node_rows: Ids  # [R, M]
    node_ids: Ids  # [R, M]
    node_parents: Ids  # [R, M]
    ancestors: NDArray[np.bool_]  # [R, M, M]


@dataclass(frozen=True, slots=True)
class DecideOutput:
    """What a decide graph gives, by the names of its outputs; valid until the next `run`."""

    is_decided: NDArray[np.bool_]  # [R]; False: the host has to decide, from the logits
    num_accepted: Ids  # [R]
    path: Ids  # [R, M], the places of the walk: the text (0), accepted nodes (i + 1), then -1
    token_ids: Ids  # [R, M], the token after each place of the walk, then -1
    logprobs: Floats  # [R, M], those of the tokens by the raw logits


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass: row b is slot `first_slot + b`."""

    input_ids: Ids  # [B, Q]
    position_ids: Ids  # [B, Q]
    write_indices: Ids  # [B]
    attention_mask: NDArray[np.bool_]  # [B, 1, Q, T]
    logits_indices: Ids  # [N], rows of the flattened [B * Q]
    hidden_states: Floats | None = None  # [B, Q, H], heads alone
    first_slot: int = 0
    decide: DecideInput | None = None
    """Decide on the step's logits, too; only for a runner that says `can_decide`."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a forward pass gives; the arrays are valid until the next `run`."""

    logits: Floats  # [N, V]; of a step that was decided, [0, V]: `StepRunner.read_logits`
    hidden_states: Floats | None = None
    """A target's taps [B, Q, W]; a head's own state [N, H], which its next step takes."""
    decided: DecideOutput | None = None
    """Where the step asked for decisions."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How large an engine is loaded: fixed for its life."""

    max_slots: int = 1
    max_length: int = 4096
    """Tokens a slot can hold."""
    max_query: int = 256
    """Most query tokens of one row in one step."""
    num_threads: int = 0
    """0: one for each usable CPU."""
    max_nodes: int = 0
    """Most drafted tokens that are written past the text of a row."""
    decides: bool | None = None
    """Load the target's decide graph, if there is one; None: where it is faster than the host."""
    dequantize: bool = False
    """Multiply integer weights out on loading and compute in fp32: slow, large and exact."""


class StepRunner(Protocol):
    """One loaded graph that owns its KV cache. Not thread-safe."""

    spec: GraphSpec
    profile: Profile
    run_time_s: float
    """Seconds spent inside the inference library so far."""
    can_decide: bool
    """Whether it runs the target's decide graph on a step's logits: where that is the faster."""

    def run(self, step: StepInput) -> StepOutput:
        """Run one step, writing the new keys and values into the cache in place."""
        ...

    def read_logits(self) -> Floats:
        """The logits [N, V] of the last step, which was decided; valid until the next `run`."""
        ...

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` cache entries of one slot over another."""
        ...

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move cache entries `start + entries[i]` of a slot to `start + i`; `entries` ascend."""
        ...

    def read_cache(self, slot: int, start: int, stop: int) -> Floats:
        """A copy of a slot's cache entries [start, stop): [L, kinds, Hkv, stop - start, D]."""
        ...

    def write_cache(self, slot: int, start: int, entries: Floats) -> None:
        """Put entries that were read where they belong, or elsewhere: the first at `start`."""
        ...

    def close(self) -> None:
        """Free the engine and its cache."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


class FunctionRunner(Protocol):
    """One loaded graph without a cache. Not thread-safe."""

    run_time_s: float
    """Seconds spent inside the inference library so far."""

    def run(self, hidden_states: Floats) -> Floats:
        """The graph's one output for its one input."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...
