"""The files of a drafting head, as its authors publish them: safetensors or torch pickles."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Tensor
from specexport.export.finite import require_finite
from specexport.export.heads.tensor_files import load_tensors
from specexport.export.shards import find_shards, read_json

if TYPE_CHECKING:
    import torch

_PICKLES = ("*.bin", "*.pt")
_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class HeadCheckpoint:
    """Memory-mapped tensors by the names of their file, and `config.json`; a `TensorSource`."""

    def __init__(
        self, source: str, config: dict[str, Any], tensors: "Mapping[str, torch.Tensor]"
    ) -> None:
        """`config` is empty where the head has none."""
        self.source = source
        self.config = config
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._find(name).shape)

    def dtype(self, name: str) -> str:
        """Storage type of one tensor."""
        word = str(self._find(name).dtype).removeprefix("torch.")
        return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(word, word)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor of floating-point numbers."""
        return require_finite(self._read(name), f"{self.source}: {name}")

    def indices(self, name: str) -> NDArray[np.int64]:
        """Read one tensor of integers or of truth values (as 0 and 1), one-dimensional."""
        tensor = self._find(name)
        if tensor.is_floating_point() or tensor.is_complex() or tensor.ndim != 1:
            raise CheckpointError(
                f"{self.source}: {name} is {self.dtype(name)} of shape {list(tensor.shape)}; "
                "expected integers of one dimension. Download it again."
            )
        return tensor.numpy().astype(np.int64)

    def _read(self, name: str) -> Tensor:
        tensor, dtype = self._find(name).contiguous(), self.dtype(name)
        if dtype == "bf16":  # numpy has no bf16 of its own
            import ml_dtypes
            import torch

            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if dtype not in ("fp32", "fp16"):
            raise CheckpointError(
                f"{name} is stored as {dtype}; expected float32, float16 or bfloat16. "
                "Give the unquantized head."
            )
        return tensor.numpy()

    def _find(self, name: str) -> "torch.Tensor":
        if name not in self._tensors:
            raise CheckpointError(f"{self.source} holds no tensor {name!r}.")
        return self._tensors[name]


def open_head(source: str | Path) -> HeadCheckpoint:
    """Open a head: a directory, one of its weight files or (downloading it) a hub id.

    Raises `CheckpointError` for a missing or damaged file, and for a pickle of more than tensors.
    """
    path = Path(source).expanduser()
    if path.is_file():
        shards = [path]
    else:
        path = path if path.is_dir() else _download(str(source))
        shards = _shards(path)
    directory = path.parent if path.is_file() else path
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors.update(load_tensors(shard))
    return HeadCheckpoint(str(source), read_json(directory / "config.json"), tensors)


def _download(hub_id: str) -> Path:
    """Fetch pickles only where there are no safetensors: many repositories hold both."""
    from specexport.export.hub import download

    directory = download(hub_id)
    return directory if any(directory.glob("*.safetensors")) else download(hub_id, _PICKLES)


def _shards(directory: Path) -> list[Path]:
    for name, others in (
        ("model.safetensors", "*.safetensors"),
        ("pytorch_model.bin", "pytorch_model*.bin"),
    ):
        if shards := find_shards(directory, name, others):
            return shards
    for name in _MEDUSA_FILES:
        if (path := directory / name).is_file():
            return [path]
    raise CheckpointError(
        f"{directory} holds no weights of a head: expected *.safetensors, pytorch_model.bin, their "
        "shards with an index, or medusa_lm_head.pt. Is the download complete?"
    )
