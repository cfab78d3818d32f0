"""What goes into an engine and what comes out: one step of one graph.

Letters: B batch rows, Q query tokens, T longest valid length, N rows that get logits, V vocabulary,
H hidden size, W the width of a target's taps.
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
class StepInput:
    """One forward pass: row b is slot `first_slot + b`."""

    input_ids: Ids  # [B, Q]
    position_ids: Ids  # [B, Q]
    write_indices: Ids  # [B]
    attention_mask: NDArray[np.bool_]  # [B, 1, Q, T]
    logits_indices: Ids  # [N], rows of the flattened [B * Q]
    hidden_states: Floats | None = None  # [B, Q, H], heads alone
    first_slot: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a forward pass gives; the arrays are valid until the next `run`."""

    logits: Floats  # [N, V]
    hidden_states: Floats | None = None
    """A target's taps [B, Q, W]; a head's own state [N, H], which its next step takes."""


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
    dequantize: bool = False
    """Multiply integer weights out on loading and compute in fp32: slow, large and exact."""


class StepRunner(Protocol):
    """One loaded graph that owns its KV cache. Not thread-safe."""

    spec: GraphSpec
    profile: Profile
    run_time_s: float
    """Seconds spent inside the inference library so far."""

    def run(self, step: StepInput) -> StepOutput:
        """Run one step, writing the new keys and values into the cache in place."""
        ...

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` cache entries of one slot over another."""
        ...

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Move cache entries `start + entries[i]` of a slot to `start + i`."""
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
