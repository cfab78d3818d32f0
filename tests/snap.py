"""Weights that int8, int4 or fp8 hold without loss: then the unquantized model is the reference."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_VOCABULARY = ("embed_tokens", "lm_head")


def snap(tensor: torch.Tensor, weight_type: str) -> torch.Tensor:
    """Near `tensor`: in each 32 numbers, multiples of a power of two, one of them the largest."""
    if tensor.ndim < 2 or tensor.shape[-1] % 32:
        return tensor
    blocks = tensor.double().reshape(-1, 32)
    largest = {"int8": 127, "int4": 7, "fp8": 448}[weight_type]
    scale = 2 ** torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / largest))
    quotients = blocks / scale
    codes = (
        quotients.to(torch.float8_e4m3fn).double() if weight_type == "fp8" else quotients.round()
    )
    extreme = blocks.abs().argmax(-1, keepdim=True)
    sign = codes.gather(-1, extreme).sign()
    codes.scatter_(-1, extreme, sign * (8 if weight_type == "int4" else largest))
    return (codes * scale).to(tensor.dtype).reshape(tensor.shape)


def snap_checkpoint(folder: Path, weight_type: str) -> Path:
    """Rewrite a checkpoint of one file for `weight_type`; vocabulary matrices are not int4."""
    path = folder / "model.safetensors"
    of_vocabulary = "int8" if weight_type == "int4" else weight_type
    tensors = {
        name: snap(tensor, of_vocabulary if any(v in name for v in _VOCABULARY) else weight_type)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
