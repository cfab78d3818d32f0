"""What training reads: sequences with the target's hidden states and likeliest tokens, in shards.

Letters: T tokens of a sequence, n taps, H the target's hidden size, k tokens with probabilities.
"""

import json
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from specexport.errors import ConfigError, SpecExportError
from specexport.export.manifest import FileEntry, Tap, hash_file
from specexport.export.methods import Frozen

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
SPEC_NAME = "dataset.json"
Split = Literal["train", "held_out"]
StateType = Literal["fp16", "bf16"]

_OPEN_SHARDS = 8


class ShardError(SpecExportError):
    """A shard of a data set is missing or damaged; the text names it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence and what the target says of it."""

    token_ids: "torch.Tensor"  # [T] int64
    is_answer: "torch.Tensor"  # [T] bool
    """True where the token is to be learnt: the target's own, or of a given text."""
    states: "torch.Tensor"  # [T, n * H] float32, the taps in the order of `DatasetSpec.taps`
    top_ids: "torch.Tensor"  # [T, k] int64, likeliest first
    """The likeliest tokens to come after each position."""
    top_probs: "torch.Tensor"  # [T, k] float32
    """Their probabilities at temperature 1, of the whole vocabulary."""


class Identity(Frozen):
    """What a data set was made for: SHA-256 of the target's files and of its tokenizer.json."""

    target: str
    tokenizer: str


class Recipe(Frozen):
    """How a data set was made; with the same answers it gives the same shards."""

    sources: dict[str, int]
    """Where the sequences come from → how many."""
    max_length: int
    """Longer sequences were cut."""
    shard_bytes: int
    budget_bytes: int | None = None


class ShardEntry(Frozen):
    """One shard: its file, and the sequences in it."""

    path: str
    """Relative to the folder."""
    file: FileEntry
    sequences_sha256: str
    """Of the tokens that it was computed from."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    held_out: tuple[int, ...]
    """Which of them are never trained on."""


class DatasetSpec(Frozen):
    """The whole of `dataset.json`."""

    schema_version: int = SCHEMA_VERSION
    identity: Identity
    vocab_size: int
    hidden_size: int
    taps: tuple[Tap, ...]
    """The residual stream after layer i, or `FINAL_NORM`: after the final norm."""
    state_type: StateType
    top_k: int
    num_tokens: int
    num_answer_tokens: int
    recipe: Recipe
    shards: tuple[ShardEntry, ...]
    is_complete: bool
    """False while shards are still to be written."""

    def columns(self, taps: "tuple[Tap, ...]") -> list[int]:
        """Which columns of `Sample.states` hold `taps`; `ConfigError` for one that is not there."""
        missing = [tap for tap in taps if tap not in self.taps]
        if missing:
            raise ConfigError(
                f"The data set holds the hidden states {list(self.taps)}; {missing} are needed "
                "as well. Make the data set again, for this method."
            )
        size = self.hidden_size
        starts = [self.taps.index(tap) * size for tap in taps]
        return [start + column for start in starts for column in range(size)]


class Dataset:
    """The samples of a folder, in the order of the shards. Shards are read when they are asked for.

    `lengths` are the tokens of each sample.
    """

    def __init__(self, folder: Path, spec: DatasetSpec) -> None:
        """Use `open`."""
        self.folder, self.spec = folder, spec
        self.lengths = [length for shard in spec.shards for length in shard.lengths]
        counts = [len(shard.lengths) for shard in spec.shards]
        self._first = [0, *accumulate(counts)]  # number of each shard's first sample
        self._held_out = {
            first + number
            for first, shard in zip(self._first, spec.shards, strict=False)
            for number in shard.held_out
        }
        self._open: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()

    @classmethod
    def open(cls, folder: str | Path) -> "Dataset":
        """Read `dataset.json`; raises `ConfigError` where it is missing, damaged or unfinished."""
        return cls(Path(folder), read_spec(Path(folder)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        """Raises `ShardError` where the shard that holds it is damaged."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._first, index) - 1
        shard, tensors = self.spec.shards[number], self._tensors(number)
        row = index - self._first[number]
        start = sum(shard.lengths[:row])
        rows = slice(start, start + shard.lengths[row])
        return Sample(
            token_ids=tensors["token_ids"][rows].long(),
            is_answer=tensors["is_answer"][rows],
            states=tensors["states"][rows].float(),
            top_ids=tensors["top_ids"][rows].long(),
            top_probs=tensors["top_probs"][rows],
        )

    def split(self, name: Split) -> list[int]:
        """The numbers of the samples to train on, or of those that are held out."""
        return [i for i in range(len(self)) if (i in self._held_out) == (name == "held_out")]

    def check(self) -> None:
        """Read every shard; raises `ShardError` for the first that is damaged."""
        for shard in self.spec.shards:
            check_shard(self.folder, shard)

    def _tensors(self, number: int) -> "dict[str, torch.Tensor]":
        """A shard's tensors, mapped into memory; few shards stay open."""
        from safetensors.torch import load_file

        if number not in self._open:
            shard = self.spec.shards[number]
            check_shard(self.folder, shard)
            self._open[number] = load_file(self.folder / shard.path)
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]


def read_spec(folder: Path, *, unfinished: bool = False) -> DatasetSpec:
    """Read `dataset.json`; raises `ConfigError`, also for an unfinished one that is not wanted."""
    path = folder / SPEC_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no {SPEC_NAME}, so it is no data set.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Make the data set again.") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema version {version!r}; this specexport reads version "
            f"{SCHEMA_VERSION}. Make the data set again."
        )
    try:
        spec = DatasetSpec.model_validate(raw)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ConfigError(f"{path} is damaged at {place!r}. Make the data set again.") from None
    if not spec.is_complete and not unfinished:
        raise ConfigError(f"The data set {folder} was not finished. Go on making it first.")
    return spec


def check_shard(folder: Path, shard: ShardEntry) -> None:
    """Raise `ShardError` unless the shard's file has the size and the hash that were noted."""
    path = folder / shard.path
    if not path.is_file():
        raise ShardError(f"The shard {path} is missing. Rebuild it from the answers.")
    found = hash_file(path)
    if found != shard.file:
        raise ShardError(
            f"The shard {path} is damaged: {found.size_bytes} bytes with SHA-256 "
            f"{found.sha256[:12]}…, but {SPEC_NAME} says {shard.file.size_bytes} bytes with "
            f"{shard.file.sha256[:12]}…. Rebuild it from the answers."
        )
