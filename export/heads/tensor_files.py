"""One file of a drafting head → plain tensors: safetensors, or a pickle of nothing but tensors."""

import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from specexport.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# What torch's messages say of a function or class that a pickle asks for.
_CALLED = re.compile(r"GLOBAL (?P<name>[A-Za-z_][\w.]{0,99})")


def load_tensors(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of one file, memory-mapped where it can be; none of the file's code is run.

    All are plain: strided, on the CPU, without a gradient. Raises `CheckpointError` otherwise.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Is the download complete?")
    found = _load_safetensors(path) if path.suffix == ".safetensors" else _load_pickle(path)
    return {name: _plain(tensor, f"{path}: {name}") for name, tensor in found.items()}


def _load_safetensors(path: Path) -> "dict[str, torch.Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file ({error}). Download it again."
        ) from None


def _load_pickle(path: Path) -> "dict[str, torch.Tensor]":
    import torch

    try:
        with warnings.catch_warnings():  # torch's, about the kinds of tensors that `_plain` refuses
            warnings.simplefilter("ignore")
            found = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(_reason(path, error)) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise CheckpointError(
            f"{path} must hold tensors by name and nothing else. Give the file of the head's "
            "weights, not of an optimizer or a whole training state."
        )
    return found


def _reason(path: Path, error: Exception) -> str:
    """Ours, not torch's, which advises to run the file's code."""
    if called := _CALLED.search(str(error)):
        return (
            f"{path} is damaged, or a pickle that runs code when it is opened "
            f"({called['name']}), which is never done here. Give a file of tensors alone, such as "
            "safetensors."
        )
    return (
        f"{path} is no whole PyTorch file of tensors. Download it again, or give another file of "
        "the head, such as safetensors."
    )


def _plain(tensor: "torch.Tensor", where: str) -> "torch.Tensor":
    """A parameter's or a lazily negated tensor's numbers; other kinds hold none of their own."""
    import torch

    if tensor.layout is not torch.strided:
        found = "a sparse tensor"
    elif tensor.device.type != "cpu":
        found = f"a tensor without numbers (on the device {tensor.device.type!r})"
    elif tensor.is_quantized:
        found = "a quantized tensor"
    elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        found = "a view that repeats its numbers"
    else:
        return tensor.detach().resolve_conj().resolve_neg()
    raise CheckpointError(
        f"{where} is {found}; expected a plain one. Save the head's weights again as "
        "dense, unquantized tensors, or give another file of them."
    )
