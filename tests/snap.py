"""Weights that int8 or int4 hold without loss: then the unquantized model is the reference."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_VOCABULARY = ("embed_tokens", "lm_head")


def snap(tensor: torch.Tensor, weight_type: str) -> torch.Tensor:
    """Near `tensor`: in each 32 numbers, multiples of a power of two, one of them the largest."""
    if tensor.ndim < 2 or tensor.shape[-1] % 32:
        return tensor
    blocks = tensor.double().reshape(-1, 32)
    largest = 127 if weight_type == "int8" else 7
    scale = 2 ** torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / largest))
    codes = (blocks / scale).round()
    extreme = blocks.abs().argmax(-1, keepdim=True)
    sign = codes.gather(-1, extreme).sign()
    codes.scatter_(-1, extreme, sign * 127 if weight_type == "int8" else sign * 8)
    return (codes * scale).to(tensor.dtype).reshape(tensor.shape)


def snap_checkpoint(folder: Path, weight_type: str) -> Path:
    """Rewrite a checkpoint of one file: vocabulary matrices for int8, others for `weight_type`."""
    path = folder / "model.safetensors"
    tensors = {
        name: snap(tensor, "int8" if any(v in name for v in _VOCABULARY) else weight_type)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
