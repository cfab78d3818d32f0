"""A head's files, as its kind is published."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from specexport.errors import ConfigError
from specexport.export.manifest import FloatType
from specexport.training.disk import write_whole

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Tensors and config.json."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `write` wrote; raises `ConfigError` where it cannot be read."""
        from safetensors.torch import load

        try:
            config = json.loads((folder / CONFIG_NAME).read_text("utf-8"))
            return cls(load((folder / WEIGHTS_NAME).read_bytes()), config)
        except Exception as error:  # the library has errors of its own for damaged files
            raise ConfigError(
                f"{folder} is no folder of a head, with {CONFIG_NAME} and {WEIGHTS_NAME}: {error}"
            ) from None

    def write(self, folder: Path, float_type: FloatType) -> None:
        """Into `folder`, each file whole; integers and truth values keep their types."""
        from safetensors.torch import save

        dtype = _TYPES[float_type]
        stored = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
            for name, tensor in self.tensors.items()
        }
        config = {**self.config, "torch_dtype": str(dtype).removeprefix("torch.")}
        write_whole(folder / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())
        write_whole(folder / WEIGHTS_NAME, save(stored, metadata={"format": "pt"}))
