"""What a head's reader finds out, and the graphs that come of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Tensor, TensorSource
from specexport.export.config import DecoderConfig
from specexport.export.graph_io import DecoderGraph
from specexport.export.layers import GraphBuilder
from specexport.export.manifest import FloatType, Tap


@dataclass(frozen=True, slots=True)
class HeadGraphs:
    """The graphs of one head; which of them there are depends on the method."""

    step: DecoderGraph | None = None
    """EAGLE, MTP: one draft step with a cache of its own; the inputs of a decoder plus
    hidden_states [B, Q, H], the outputs logits [N, V] and recycled_states [N, H]."""
    step_config: DecoderConfig | None = None
    """Goes with `step`: its own layers, vocabulary and head sizes."""
    fuse: DecoderGraph | None = None
    """EAGLE-3: the target's taps hidden_states [M, n * H_target] → features [M, H]."""
    medusa: DecoderGraph | None = None
    """Medusa: hidden_states [B, H] → logits [B, heads, V]."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A recognised head: all of its tensors are accounted for before anything is written."""

    layout: str
    """What it was recognised as, for people: "EAGLE-3, SpecForge"."""
    taps: tuple[Tap, ...]
    """Hidden states of the target that it reads, in order."""
    tensors: "RenamedTensors"
    """The checkpoint's tensors under the names that the graphs use."""
    build: Callable[[GraphBuilder, FloatType, int], HeadGraphs]
    """From the target's builder (the lender of embedding and lm_head), the type in which weights
    are stored and the number of positions."""
    token_map: NDArray[np.int64] | None = None
    """[V_draft]: the target's id of each draft id; None where the vocabularies are one."""
    notes: tuple[str, ...] = ()


def renamed_once(source: str, files: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """New name → name in the file; raises `CheckpointError` where two files' names become one."""
    renamed: dict[str, str] = {}
    for file in sorted(files):
        name = rename(file)
        if name in renamed:
            raise CheckpointError(
                f"{source} holds one tensor under two names, {renamed[name]!r} and {file!r}. "
                "Remove one of them."
            )
        renamed[name] = file
    return renamed


class RenamedTensors:
    """Some tensors of a checkpoint under other names; a `TensorSource` itself."""

    def __init__(self, source: TensorSource, names: dict[str, str]) -> None:
        """`names` maps new names to the checkpoint's; what it leaves out is not there."""
        self.source, self.renamed = source.source, names
        self._tensors = source

    def names(self) -> Iterable[str]:
        """The new names."""
        return self.renamed.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._tensors.shape(self._original(name))

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Rows and columns; raises `CheckpointError` where the tensor is no matrix of some."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(
                f"{self.source}: {self.renamed[name]} has shape {list(shape)}; a matrix was "
                "expected. Download it again."
            )
        return shape[0], shape[1]

    def dtype(self, name: str) -> str:
        """Storage type of one tensor."""
        return self._tensors.dtype(self._original(name))

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._tensors.tensor(self._original(name))

    def without(self, name: str) -> "RenamedTensors":
        """The same but for one tensor."""
        return RenamedTensors(self._tensors, {k: v for k, v in self.renamed.items() if k != name})

    def _original(self, name: str) -> str:
        if name not in self.renamed:
            raise CheckpointError(f"{self.source} holds no tensor for {name!r}.")
        return self.renamed[name]
