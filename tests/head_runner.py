"""Step graphs of heads on plain ONNX Runtime, with caches fed and fetched by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Array = NDArray[Any]
CACHE_LENGTH = 64


class HeadRunner:
    """One row of a step head over a growing cache."""

    def __init__(self, path: Path) -> None:
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._caches = {
            value.name: _zeros(value.shape)
            for value in self._session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        self._length = 0

    @property
    def cache_shapes(self) -> list[tuple[int, ...]]:
        return [cache.shape for cache in self._caches.values()]

    def run(self, ids: list[int], hidden: Array) -> tuple[Array, Array]:
        """Append rows of tokens t[i+1] and states h[i]: logits [n, V], recycled states [n, H]."""
        start, stop = self._length, self._length + len(ids)
        positions = np.arange(start, stop)
        feeds = {
            "input_ids": np.array([ids]),
            "position_ids": positions[None],
            "hidden_states": hidden[None].astype(np.float32),
            "write_indices": np.array([start]),
            "attention_mask": (np.arange(stop) <= positions[:, None])[None, None],
            "logits_indices": np.arange(len(ids)),
        }
        names = [value.name for value in self._session.get_outputs()]
        found = dict(zip(names, self._session.run(None, feeds | self._caches), strict=True))
        for name in self._caches:
            self._caches[name] = found[name.replace("past_key_values", "present")]
        self._length = stop
        return found["logits"], found["recycled_states"]


def _zeros(shape: list[int | str]) -> Array:
    sizes = {"batch": 1, "cache_length": CACHE_LENGTH}
    return np.zeros([sizes[d] if isinstance(d, str) else d for d in shape], np.float32)
