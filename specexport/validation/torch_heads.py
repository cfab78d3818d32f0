"""Drafting heads in PyTorch, over whole sequences: the reference of graphs.

Which tensor is which, and what a producer's config means, is read as `build` reads it; the
equations are written here once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.export.config import DecoderConfig
from specexport.export.heads.eagle3_layouts import Eagle3Layout, read_layout
from specexport.export.heads.head_checkpoint import HeadCheckpoint, open_head
from specexport.export.heads.plan import HeadPlan, RenamedTensors
from specexport.export.heads.plans import HEAD_METHODS
from specexport.export.manifest import FloatType
from specexport.validation.reference import Reference, rounded
from specexport.validation.torch_layers import EagleLayers, Weights

Rows = tuple[torch.Tensor, torch.Tensor]
"""Logits [T, V_draft] and recycled states [T, H]."""


class StepHead(Protocol):
    """A head that drafts step by step, over whole sequences."""

    layout: str
    token_map: NDArray[np.int64] | None
    """[V_draft]: the target's ids."""

    def taps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The target's hidden states that the head is given: [T, W]."""
        ...

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """What the head makes of them before its first step: [T, H]."""
        ...

    def run(self, token_ids: Sequence[int], features: torch.Tensor) -> Rows:
        """Row i has token i, features i and position i."""
        ...


@dataclass(frozen=True, slots=True)
class _Opened:
    """A head's checkpoint, recognised."""

    checkpoint: HeadCheckpoint
    plan: HeadPlan
    weights: Weights

    @classmethod
    def read(
        cls, method: str, source: str, target: DecoderConfig, weight_type: FloatType
    ) -> "_Opened":
        checkpoint = open_head(source)
        plan = HEAD_METHODS[method](checkpoint, target)
        return cls(checkpoint, plan, read_weights(plan.tensors, weight_type))


def read_weights(tensors: RenamedTensors, weight_type: FloatType) -> Weights:
    """All tensors, fp32, matrices rounded as a bundle stores them."""
    arrays = {name: tensors.tensor(name).astype(np.float32) for name in tensors.names()}
    return {name: rounded(torch.from_numpy(a), weight_type) for name, a in arrays.items()}


class TorchMedusa:
    """Medusa heads."""

    def __init__(
        self, reference: Reference, source: str, target: DecoderConfig, weight_type: FloatType
    ) -> None:
        """Read the head at `source`."""
        opened = _Opened.read("medusa", source, target, weight_type)
        self._reference, self._weights = reference, opened.weights
        self.layout, self.token_map = opened.plan.layout, opened.plan.token_map
        names = [name.split(".") for name in opened.weights if ".blocks." in name]
        self._num_heads = 1 + max(int(parts[1]) for parts in names)
        self._num_blocks = 1 + max(int(parts[3]) for parts in names)

    def taps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The states after the final norm: [T, H]."""
        return self._reference.taps(token_ids, ("norm",))

    def logits(self, states: torch.Tensor) -> torch.Tensor:  # [T, H] -> [T, heads, V_draft]
        """`x + silu(W x + b)` in each block, then the output matrix."""
        return torch.stack([self._head(states, i) for i in range(self._num_heads)], dim=1)

    def _head(self, x: torch.Tensor, head: int) -> torch.Tensor:
        w = self._weights
        for block in range(self._num_blocks):
            name = f"heads.{head}.blocks.{block}"
            y = torch.nn.functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
            x = x + torch.nn.functional.silu(y)
        own = w.get(f"heads.{head}.lm_head.weight", w.get("heads.0.lm_head.weight"))
        return x @ (self._reference.output_matrix if own is None else own).T


class TorchEagle:
    """An EAGLE-1/2 head: `fc(cat(e, h))`, layers, the target's output matrix."""

    def __init__(
        self, reference: Reference, source: str, target: DecoderConfig, weight_type: FloatType
    ) -> None:
        """Read the head at `source`."""
        opened = _Opened.read("eagle", source, target, weight_type)
        self._reference, self._weights = reference, opened.weights
        self.layout, self.token_map = opened.plan.layout, opened.plan.token_map
        self._layers = EagleLayers(opened.weights, opened.checkpoint.config)

    def taps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The states after the final norm: [T, H]."""
        return self._reference.taps(token_ids, ("norm",))

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """Read as they are."""
        return taps

    def run(self, token_ids: Sequence[int], features: torch.Tensor) -> Rows:
        """Row i has token i, features i and position i."""
        w = self._weights
        table = w.get("embed_tokens.weight", self._reference.embedding)
        x = torch.cat([table[list(token_ids)], features], dim=-1)
        x = torch.nn.functional.linear(x, w["fc.weight"], w.get("fc.bias"))
        x = self._layers.run(x, x)
        return x @ self._reference.output_matrix.T, x


class TorchEagle3:
    """An EAGLE-3 head."""

    def __init__(
        self, reference: Reference, source: str, target: DecoderConfig, weight_type: FloatType
    ) -> None:
        """Read the head at `source`."""
        opened = _Opened.read("eagle3", source, target, weight_type)
        checkpoint = opened.checkpoint
        self._layout: Eagle3Layout = read_layout(
            checkpoint.config, list(checkpoint.names()), checkpoint.source
        )
        self._reference, self._weights = reference, opened.weights
        self.layout, self.token_map = opened.plan.layout, opened.plan.token_map
        self._taps = opened.plan.taps
        self._layers = EagleLayers(opened.weights, self._layout.layers)

    def taps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Of several layers: [T, n * H_target]."""
        return self._reference.taps(token_ids, self._taps)

    def features(self, taps: torch.Tensor) -> torch.Tensor:  # [T, n * H_target] -> [T, H]
        """`fc`, after the norms where there are some."""
        w = self._weights
        if "input_norm.weight" in w:
            taps = self._norm(taps, "input_norm")
        if "fc_norm.0.weight" in w:
            parts = taps.chunk(len(self._taps), dim=-1)
            normed = [self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            taps = torch.cat(normed, dim=-1)
        return torch.nn.functional.linear(taps, w["fc.weight"], w.get("fc.bias"))

    def run(self, token_ids: Sequence[int], features: torch.Tensor) -> Rows:
        """Row i has token i, features i and position i."""
        w = self._weights
        own_table = w.get("embed_tokens.weight")
        table = self._reference.embedding if own_table is None else own_table
        e = self._norm(table[list(token_ids)], "layers.0.input_layernorm")
        g = self._norm(features, "layers.0.hidden_norm")
        residual = g if self._layout.norm_before_residual else features
        x = self._layers.run(residual, torch.cat([e, g], dim=-1))
        normed = self._norm(x, "norm")
        output = w.get("lm_head.weight")
        if output is None:
            is_tied = own_table is not None and self._layout.layers.get("tie_word_embeddings")
            output = table if is_tied else self._reference.output_matrix
        return normed @ output.T, normed if self._layout.norm_output else x

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._layers.norm(x, f"{name}.weight")
