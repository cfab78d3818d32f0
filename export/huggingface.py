"""Hugging Face directories: config.json, safetensors (sharded or not), tokenizer files."""

import json
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from specexport.errors import CheckpointError
from specexport.export.checkpoint import Tensor
from specexport.export.finite import require_finite
from specexport.export.fp8 import SCALE_SUFFIX, dequantize, read_block_size
from specexport.export.shards import find_shards, read_json

_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_FP8 = "F8_E4M3"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class HuggingFaceCheckpoint:
    """A directory with config.json and safetensors files, memory-mapped."""

    def __init__(self, path: Path, source: str) -> None:
        """Open every shard; raises `CheckpointError` if one is missing or damaged."""
        self.path = path
        self.source = source
        self.notes: list[str] = []
        self.config = read_json(path / "config.json", required=True)
        self.generation_config = read_json(path / "generation_config.json")
        self._stack = ExitStack()
        self._files = self._open_shards()
        self._block_size = read_block_size(self.config)
        self._scales = self._find_scales()
        if self._scales:
            self.notes.append(
                f"{len(self._scales)} FP8 matrices are dequantized; activations are not quantized."
            )

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._files.keys() - set(self._scales.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Storage type of one tensor; dequantized FP8 counts as bf16."""
        word = self._stored_dtype(name)
        return "bf16" if name in self._scales else _DTYPES.get(word, word)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        return require_finite(self._read(name), f"{self.source}: {name}")

    def _read(self, name: str) -> Tensor:
        if self.dtype(name) not in _DTYPES.values():
            raise CheckpointError(
                f"{name} is stored as {self.dtype(name)}; expected F32, F16 or BF16. "
                "Give the unquantized checkpoint."
            )
        tensor = self._files[name].get_tensor(name)
        if (scale_name := self._scales.get(name)) and self._block_size:
            scale = self._files[scale_name].get_tensor(scale_name).float().numpy()
            return dequantize(tensor.float().numpy(), scale, self._block_size, name)
        if self.dtype(name) == "bf16":  # numpy has no bf16 of its own
            import ml_dtypes
            import torch

            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
        return tensor.numpy()  # type: ignore[no-any-return]

    def write_tokenizer(self, directory: Path) -> None:
        """Copy the tokenizer files; an older tokenizer without tokenizer.json is converted."""
        for name in _TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, directory / name)
        if not (directory / "tokenizer.json").is_file():
            self._convert_tokenizer(directory)
        _add_missing_tokens(directory)

    def _convert_tokenizer(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(self.path).backend_tokenizer.save(
                str(directory / "tokenizer.json")
            )
        except Exception as error:
            raise CheckpointError(
                f"{self.path} holds no tokenizer.json, and transformers cannot make one: "
                f"{str(error).splitlines()[0]}. Copy the tokenizer files beside config.json."
            ) from None

    def _slice(self, name: str) -> Any:  # noqa: ANN401 - safetensors has no types
        if name not in self._files:
            raise CheckpointError(
                f"{self.path} holds no tensor {name!r}. Is the download complete?"
            )
        return self._files[name].get_slice(name)

    def _stored_dtype(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def _find_scales(self) -> dict[str, str]:
        """The scale tensor of each FP8 matrix; raises `CheckpointError` where one is missing."""
        if self._block_size is None:
            return {}
        scales = {n: n + SCALE_SUFFIX for n in self._files if self._stored_dtype(n) == _FP8}
        for name, scale in scales.items():
            if scale not in self._files:
                raise CheckpointError(
                    f"{self.path} holds {name} in FP8 but no {scale}, which scales it. "
                    "Is the download complete?"
                )
        return scales

    def _open_shards(self) -> dict[str, Any]:
        from safetensors import SafetensorError, safe_open

        files: dict[str, Any] = {}
        for shard in self._shard_paths():
            if not shard.is_file():
                raise CheckpointError(f"{shard} is missing. Is the download complete?")
            try:
                file = self._stack.enter_context(safe_open(shard, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(
                    f"{shard} is no whole safetensors file ({error}). Download it again."
                ) from None
            files.update(dict.fromkeys(file.keys(), file))
        return files

    def _shard_paths(self) -> list[Path]:
        if shards := find_shards(self.path, "model.safetensors", "*.safetensors"):
            return shards
        pickles = [p.name for p in self.path.glob("*.bin")]
        hint = (
            f"It has {pickles[0]}: convert it with transformers' save_pretrained."
            if pickles
            else "Is the download complete?"
        )
        raise CheckpointError(f"{self.path} holds no .safetensors file. {hint}")


def _add_missing_tokens(directory: Path) -> None:
    """Some tokenizer_config.json files name added tokens that tokenizer.json lacks."""
    from tokenizers import AddedToken, Tokenizer

    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = {int(i): dict(t) for i, t in config["added_tokens_decoder"].items()}
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # no such file or key, or damaged: whoever reads it next will say so
        return
    missing = {
        i: t for i, t in sorted(named.items()) if tokenizer.token_to_id(t["content"]) is None
    }
    for token_id, token in missing.items():
        flags = {k: bool(v) for k, v in token.items() if k in ("special", "lstrip", "rstrip")}
        tokenizer.add_tokens([AddedToken(token["content"], normalized=False, **flags)])
        if tokenizer.token_to_id(token["content"]) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives the token {token['content']!r} the id {token_id}, "
                "which tokenizer.json leaves no place for. Save the tokenizer again with "
                "transformers."
            )
    if missing:
        tokenizer.save(str(directory / "tokenizer.json"))
