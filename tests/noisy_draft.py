"""A draft model of real weights where none is published: the target with noise on its layers.

Right often, but not always; `python -m tests.noisy_draft MODEL OUTPUT` writes one.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from specexport.export.checkpoint import open_checkpoint

NOISE = 0.1  # of each matrix's standard deviation


def write_noisy_draft(source: str, output: Path) -> Path:
    """Write the noisy model as a Hugging Face directory."""
    checkpoint = open_checkpoint(source)
    rng = np.random.default_rng(0)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.startswith("model.layers."):
            noise = rng.normal(0, NOISE * tensor.std(), tensor.shape)
            tensors[name] = (tensor + noise).astype(np.float32)
    output.mkdir(parents=True)
    save_file(tensors, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(checkpoint.config))
    checkpoint.write_tokenizer(output)
    return output


if __name__ == "__main__":
    write_noisy_draft(sys.argv[1], Path(sys.argv[2]))
