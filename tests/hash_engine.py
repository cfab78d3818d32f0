"""A fake engine whose logits hash everything that a row may look at.

It keeps a real (slot, position) cache of tokens, so a wrong position, a stale entry, a swapped
slot or a mask error changes the next token.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.errors import EngineError
from specexport.export.manifest import GraphSpec

VOCAB_SIZE = 12


def hash_logits(visible: list[int], salt: int = 0, vocab_size: int = VOCAB_SIZE) -> Any:
    """The distribution after a text: a pure function of its tokens."""
    seed = zlib.crc32(np.array([salt, *visible], dtype=np.int64).tobytes())
    return np.random.default_rng(seed).normal(0, 2, vocab_size).astype(np.float32)


def graph_spec(**overrides: Any) -> GraphSpec:
    values: dict[str, Any] = {
        "path": "fake.onnx",
        "family": "hash",
        "architecture": "Hash",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 1,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "max_length": 256,
        "weight_type": "fp32",
        "is_rounded": False,
        "num_parameters": 0,
        "inputs": (),
        "outputs": (),
    }
    return GraphSpec(**{**values, **overrides})


@dataclass
class HashEngine:
    """Implements `StepRunner`. `suffix` limits what logits depend on to the last tokens."""

    spec: GraphSpec = field(default_factory=graph_spec)
    profile: Profile = field(
        default_factory=lambda: Profile(max_slots=4, max_length=200, max_query=16)
    )
    salt: int = 0
    suffix: int | None = None
    fail_at: set[int] = field(default_factory=set)
    run_time_s: float = 0.0
    steps: list[StepInput] = field(default_factory=list)

    def __post_init__(self) -> None:
        length = self.profile.max_length + self.profile.max_query
        self.cache = np.full((self.profile.max_slots, length), -1, dtype=np.int64)

    def run(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        if len(self.steps) in self.fail_at:
            raise EngineError("the fake engine was told to fail")
        num_rows, width = step.input_ids.shape
        assert width <= self.profile.max_query
        assert step.attention_mask.shape[:3] == (num_rows, 1, width)
        for b, start in enumerate(step.write_indices):
            self.cache[b, start : start + width] = step.input_ids[b]
            assert start + width <= self.cache.shape[1]
        return StepOutput(
            np.stack([self._logits(step, *divmod(int(i), width)) for i in step.logits_indices])
        )

    def _logits(self, step: StepInput, b: int, q: int) -> Any:
        mask = step.attention_mask[b, 0, q]
        visible = self.cache[b, : len(mask)][mask].tolist()
        # What a query may look at ends with itself, at its own position.
        assert visible[-1] == step.input_ids[b, q]
        assert int(np.flatnonzero(mask)[-1]) == step.position_ids[b, q]
        window = self.spec.sliding_window
        assert window is not None or len(visible) == step.position_ids[b, q] + 1
        if self.suffix is not None:
            visible = visible[-self.suffix :]
        return hash_logits(visible, self.salt, self.spec.vocab_size)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.cache[destination] = -1  # what was not asked to be moved is lost
        self.cache[destination, :length] = self.cache[source, :length]

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
