"""Step graphs of heads on plain ONNX Runtime, with caches fed and fetched by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Array = NDArray[Any]
Rows = tuple[Array, Array]
"""Logits [n, V] and recycled states [n, H]."""

CACHE_LENGTH = 64
_PADDING = 7.0  # anything: it must not matter


class HeadRunner:
    """A step head over growing caches, of one sequence or of several side by side."""

    def __init__(self, path: Path, num_sequences: int = 1) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # caches fed and fetched are copied, which it warns of
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        sizes = {"batch": num_sequences, "cache_length": CACHE_LENGTH}
        self._caches = {
            value.name: np.zeros([sizes.get(d, d) for d in value.shape], np.float32)
            for value in self._session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        self._lengths = np.zeros(num_sequences, np.int64)

    def run(self, ids: Sequence[int], hidden: Array) -> Rows:
        """Append rows of tokens t[i+1] and states h[i] to the only sequence."""
        return self.run_ragged([ids], [hidden])[0]

    def run_ragged(self, token_ids: Sequence[Sequence[int]], hidden: Sequence[Array]) -> list[Rows]:
        """Append rows to each sequence, as many as it likes."""
        counts = [len(ids) for ids in token_ids]
        num_sequences, width = len(counts), max(counts)
        ids = np.zeros((num_sequences, width), np.int64)
        states = np.full((num_sequences, width, hidden[0].shape[-1]), _PADDING, np.float32)
        for b, count in enumerate(counts):
            ids[b, :count], states[b, :count] = token_ids[b], hidden[b]
        positions = self._lengths[:, None] + np.arange(width)
        keys = np.arange(max(self._lengths + counts))
        feeds = {
            "input_ids": ids,
            "position_ids": positions,
            "hidden_states": states,
            "write_indices": self._lengths,
            "attention_mask": (keys <= positions[:, :, None])[:, None],
            "logits_indices": np.arange(num_sequences * width),
        }
        names = [value.name for value in self._session.get_outputs()]
        found = dict(zip(names, self._session.run(None, feeds | self._caches), strict=True))
        for name in self._caches:
            self._caches[name] = found[name.replace("past_key_values", "present")]
        self._lengths = self._lengths + counts
        logits, recycled = (
            found[name].reshape(num_sequences, width, -1) for name in ("logits", "recycled_states")
        )
        return [(logits[b, :count], recycled[b, :count]) for b, count in enumerate(counts)]
