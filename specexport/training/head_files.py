"""A head's files, as its kind is published."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specexport.export.manifest import FloatType
from specexport.training.disk import write_whole

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Tensors and config.json."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    def write(self, folder: Path, float_type: FloatType) -> None:
        """Into `folder`, each file whole; integers and truth values keep their types."""
        from safetensors.torch import save

        dtype = _TYPES[float_type]
        stored = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
            for name, tensor in self.tensors.items()
        }
        config = {**self.config, "torch_dtype": str(dtype).removeprefix("torch.")}
        write_whole(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        write_whole(folder / "model.safetensors", save(stored, metadata={"format": "pt"}))
