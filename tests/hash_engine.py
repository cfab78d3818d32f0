"""A fake engine whose logits hash everything that a row may look at.

It keeps a real (slot, position) cache of tokens, so a wrong position, a stale entry, a swapped
slot or a mask error changes the next token.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from specexport.engines.ort_decide import OrtDecider
from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.errors import EngineError
from specexport.export.manifest import GraphSpec, TensorSpec

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
    }
    values |= overrides
    cache = ("batch", values["num_kv_heads"], "cache_length", values["head_dim"])
    layers = [f"{i}.{kind}" for i in range(values["num_layers"]) for kind in ("key", "value")]
    inputs = {
        "input_ids": ("batch", "query"),
        "position_ids": ("batch", "query"),
        "write_indices": ("batch",),
        "attention_mask": ("batch", 1, "query", "valid_length"),
        "logits_indices": ("num_logits",),
        **{f"past_key_values.{name}": cache for name in layers},
    }
    outputs = {
        "logits": ("num_logits", values["vocab_size"]),
        **{f"present.{name}": cache for name in layers},
    }
    return GraphSpec(**values, inputs=_tensors(inputs), outputs=_tensors(outputs))


def _tensors(shapes: Mapping[str, tuple[int | str, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=n, dtype="float32", shape=shape) for n, shape in shapes.items())


class _Texts:
    """Numbers for texts, so that a hidden state of one number can stand for a whole text."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], int] = {}
        self._texts: list[tuple[int, ...]] = []

    def id(self, text: Sequence[int]) -> int:
        key = tuple(text)
        if key not in self._ids:
            self._ids[key] = len(self._texts)
            self._texts.append(key)
        return self._ids[key]

    def text(self, number: float) -> list[int]:
        return list(self._texts[int(number)])


TEXTS = _Texts()


@dataclass
class HashEngine:
    """Implements `StepRunner`. `suffix` limits what logits depend on to the last tokens."""

    spec: GraphSpec = field(default_factory=graph_spec)
    profile: Profile = field(
        default_factory=lambda: Profile(max_slots=4, max_length=200, max_query=16)
    )
    salt: int = 0
    suffix: int | None = None
    has_taps: bool = False
    fail_at: set[int] = field(default_factory=set)
    run_time_s: float = 0.0
    decider: OrtDecider | None = None
    steps: list[StepInput] = field(default_factory=list)

    def __post_init__(self) -> None:
        length = self.profile.max_length + self.profile.max_query
        self.can_decide = self.decider is not None
        self._last = np.empty((0, self.spec.vocab_size), dtype=np.float32)
        self.cache = np.full((self.profile.max_slots, length), -1, dtype=np.int64)

    def run(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        if len(self.steps) in self.fail_at:
            raise EngineError("the fake engine was told to fail")
        num_rows, width = step.input_ids.shape
        assert width <= self.profile.max_query
        assert step.attention_mask.shape[:3] == (num_rows, 1, width)
        for b, start in enumerate(step.write_indices):
            self.cache[step.first_slot + b, start : start + width] = step.input_ids[b]
            assert start + width <= self.cache.shape[1]
        rows = [self._logits(step, *divmod(int(i), width)) for i in step.logits_indices]
        logits = self._last = np.stack(rows)
        hidden_states = self._hidden_states(step) if self.has_taps else None
        if step.decide is None:
            return StepOutput(logits, hidden_states)
        assert self.decider is not None
        return StepOutput(logits[:0], hidden_states, self.decider.run(logits, step.decide))

    def read_logits(self) -> Any:
        assert self.steps[-1].decide is not None
        return self._last

    def _logits(self, step: StepInput, b: int, q: int) -> Any:
        visible = self._checked(step, b, q)
        if self.suffix is not None:
            visible = visible[-self.suffix :]
        return hash_logits(visible, self.salt, self.spec.vocab_size)

    def _checked(self, step: StepInput, b: int, q: int) -> list[int]:
        visible = self._visible(step, b, q)
        # What a query may look at ends with itself, at its own position.
        assert visible[-1] == step.input_ids[b, q]
        window = self.spec.sliding_window
        assert window is not None or len(visible) == step.position_ids[b, q] + 1
        return visible

    def _visible(self, step: StepInput, b: int, q: int) -> list[int]:
        mask = step.attention_mask[b, 0, q]
        row = self.cache[step.first_slot + b, : len(mask)]
        return row[mask].tolist()  # type: ignore[no-any-return]

    def _hidden_states(self, step: StepInput) -> Any:
        """[B, Q, 1]: each state stands for the text that its query sees."""
        num_rows, width = step.input_ids.shape
        ids = [[TEXTS.id(self._visible(step, b, q)) for q in range(width)] for b in range(num_rows)]
        return np.array(ids, dtype=np.float32)[:, :, None]

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.cache[destination] = -1  # what was not asked to be moved is lost
        self.cache[destination, :length] = self.cache[source, :length]

    def compact(self, slot: int, start: int, entries: Sequence[int]) -> None:
        kept = self.cache[slot, [start + entry for entry in entries]]
        self.cache[slot, start:] = -1
        self.cache[slot, start : start + len(entries)] = kept

    def read_cache(self, slot: int, start: int, stop: int) -> Any:
        return self.cache[slot, None, None, None, start:stop, None].astype(np.float32)

    def write_cache(self, slot: int, start: int, entries: Any) -> None:
        self.cache[slot, start : start + entries.shape[3]] = entries[0, 0, 0, :, 0]

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass
class HashHead(HashEngine):
    """A drafting head over the hash engine's hidden states: a row's state stands for the text up
    to i and its token is the one at i + 1, so its logits are those of the target after i + 1.

    It is the target's equal as long as every row gets the right state, token and position, and
    sees the right rows: its own cache keeps the tokens, which must agree with the state.
    """

    def run(self, step: StepInput) -> StepOutput:
        assert step.hidden_states is not None
        output = super().run(step)
        states = [
            self._state(step, *divmod(int(i), step.input_ids.shape[1])) for i in step.logits_indices
        ]
        return StepOutput(output.logits, np.array(states, dtype=np.float32)[:, None])

    def _state(self, step: StepInput, b: int, q: int) -> int:
        assert step.hidden_states is not None
        before = TEXTS.text(step.hidden_states[b, q, 0])
        return TEXTS.id([*before, int(step.input_ids[b, q])])

    def _logits(self, step: StepInput, b: int, q: int) -> Any:
        text = TEXTS.text(self._state(step, b, q))
        assert text[1:] == self._checked(step, b, q)
        return hash_logits(text, self.salt, self.spec.vocab_size)
