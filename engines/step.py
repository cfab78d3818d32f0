"""What goes into an engine and what comes out: one step of one graph.

Letters: B batch rows, Q query tokens, T longest valid length, N rows that get logits, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specexport.export.manifest import GraphSpec

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass over slots 0..B-1."""

    input_ids: Ids  # [B, Q]
    position_ids: Ids  # [B, Q]
    write_indices: Ids  # [B]
    attention_mask: NDArray[np.bool_]  # [B, 1, Q, T]
    logits_indices: Ids  # [N], rows of the flattened [B * Q]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a forward pass gives; the arrays are valid until the next `run`."""

    logits: NDArray[np.float32]  # [N, V]


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

    def close(self) -> None:
        """Free the engine and its cache."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
