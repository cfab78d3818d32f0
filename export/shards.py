"""The files of a checkpoint directory: its JSON files and its shards."""

import json
from pathlib import Path
from typing import Any

from specexport.errors import CheckpointError


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is no such file, unless it is `required`."""
    if not path.is_file():
        if required:
            raise CheckpointError(
                f"{path} is missing. Expected a Hugging Face directory with config.json, "
                "*.safetensors and tokenizer files."
            )
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}. Download it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; it holds {type(value).__name__}.")
    return value


def find_shards(directory: Path, name: str, others: str) -> list[Path]:
    """`directory/name` if it is there, else what its index lists, else what `others` matches.

    The single file wins over an index, as in transformers.
    """
    if (single := directory / name).is_file():
        return [single]
    index_path = directory / f"{name}.index.json"
    if index := read_json(index_path):
        return _indexed_shards(index_path, index.get("weight_map"))
    return sorted(directory.glob(others))


def _indexed_shards(index_path: Path, weight_map: object) -> list[Path]:
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise CheckpointError(
            f"{index_path} must map tensors to file names under 'weight_map'. Download it again."
        )
    return [index_path.parent / name for name in sorted(set(names))]
