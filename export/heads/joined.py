"""A target's checkpoint with the MTP layer of other files in the place of its own."""

from collections.abc import Iterable
from pathlib import Path

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Checkpoint, Tensor, TensorSource
from specexport.export.heads.head_checkpoint import HeadCheckpoint
from specexport.export.mtp_tensors import mtp_tensors


class JoinedCheckpoint:
    """A `Checkpoint`; of the head's files it takes the tensors of an MTP layer alone."""

    def __init__(self, target: Checkpoint, head: HeadCheckpoint, num_layers: int) -> None:
        """Raises `CheckpointError` where the head holds none; the target has `num_layers`."""
        self.source, self._target = head.source, target
        self.config, self.generation_config = target.config, target.generation_config
        self.notes = target.notes
        own = mtp_tensors(target.names(), num_layers)
        taken = mtp_tensors(head.names(), num_layers)
        if not taken:
            raise CheckpointError(
                f"{head.source} holds no tensors of an MTP layer, such as 'mtp.fc.weight'. Give "
                "another --head, or leave it out where the target has a layer of its own."
            )
        self._sources: dict[str, TensorSource] = {
            **{name: target for name in target.names() if name not in own},
            **dict.fromkeys(taken, head),
        }

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._source_of(name).shape(name)

    def dtype(self, name: str) -> str:
        """Storage type of one tensor."""
        return self._source_of(name).dtype(name)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._source_of(name).tensor(name)

    def write_tokenizer(self, directory: Path) -> None:
        """The target's."""
        self._target.write_tokenizer(directory)

    def _source_of(self, name: str) -> TensorSource:
        return self._sources.get(name, self._target)
