"""A checkpoint as the exporter sees it: a config, named tensors read one at a time, its files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specexport.errors import CheckpointError
from specexport.export.finite import is_finite

Tensor = NDArray[Any]  # float32, float16 or ml_dtypes.bfloat16


class TensorSource(Protocol):
    """Named tensors, read one at a time."""

    source: str
    """What the user gave: a directory, a hub id or a file."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def dtype(self, name: str) -> str:
        """Storage type of one tensor: fp32, fp16, bf16 or the file's own word for another."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor; raises `CheckpointError` if it is missing, cut off or not finite."""
        ...


class Checkpoint(TensorSource, Protocol):
    """Tensors by their Hugging Face names, plus what the tokenizer and generation need."""

    config: dict[str, Any]
    """As `config.json`."""
    generation_config: dict[str, Any]
    """As `generation_config.json`; empty where there is none."""
    notes: list[str]
    """What was decided about the checkpoint, in sentences for the user."""

    def write_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template."""
        ...


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a Hugging Face directory, a GGUF file or (downloading it) a hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        if not is_gguf(path):
            raise CheckpointError(
                f"{path} is a file but no GGUF file. Give a Hugging Face directory "
                "(with config.json and *.safetensors), a hub id such as org/name, or a GGUF file."
            )
        from specexport.export.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    from specexport.export.hub import download
    from specexport.export.huggingface import HuggingFaceCheckpoint

    directory = path if path.is_dir() else download(str(source))
    return HuggingFaceCheckpoint(directory, str(source))


def is_gguf(path: Path) -> bool:
    """True when the file begins with GGUF's magic number."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def as_dtype(tensor: Tensor, weight_type: str, name: str) -> Tensor:
    """Convert to fp32, fp16 or bf16; raises `CheckpointError` where the numbers do not fit."""
    import ml_dtypes

    target = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[weight_type]
    if tensor.dtype == target:
        return tensor
    with np.errstate(over="ignore"):
        converted = tensor.astype(target)
    if weight_type != "fp32" and not is_finite(converted):
        larger = "bf16 or fp32" if weight_type == "fp16" else "fp32"
        raise CheckpointError(
            f"{name} does not fit {weight_type} (largest magnitude {float(np.abs(tensor).max()):g})"
            f". Use --weights {larger}."
        )
    return converted
