"""Which target and tokenizer data are made for."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from specexport.errors import ConfigError
from specexport.export.checkpoint import Checkpoint
from specexport.export.manifest import MANIFEST_NAME, hash_file, read_manifest
from specexport.export.parts import ModelSource
from specexport.training.samples import Identity


@dataclass(frozen=True, slots=True)
class TargetSource:
    """The model that heads are trained for, before it is quantized."""

    source: ModelSource
    identity: Identity

    @classmethod
    def open(cls, target: str) -> "TargetSource":
        """A checkpoint, or a bundle, which stands for the checkpoint that it was built from.

        Raises `CheckpointError`, and `ConfigError` for a bundle with integer weights.
        """
        source = ModelSource.open(find_checkpoint(target), "target")
        return cls(source, identify(source.checkpoint))


def find_checkpoint(target: str) -> str:
    """`target` itself, or the checkpoint that a bundle was built from.

    Raises `ConfigError` for a bundle with integer weights: a head that is trained on rounded
    states learns the rounding.
    """
    folder = Path(target).expanduser()
    if not (folder / MANIFEST_NAME).is_file():
        return target
    manifest = read_manifest(folder)
    if manifest.target.is_quantized:
        raise ConfigError(
            f"{target} is a bundle whose matrices are stored as {manifest.target.stored_as}. "
            "Heads are trained on the states of the model before it is quantized: give the "
            f"checkpoint itself ({manifest.provenance.checkpoint})."
        )
    return manifest.provenance.checkpoint


def identify(checkpoint: Checkpoint) -> Identity:
    """Hashes of the checkpoint's weights and tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write_tokenizer(Path(folder))
        tokenizer = hash_file(Path(folder) / "tokenizer.json").sha256
    return Identity(target=_hash_tensors(checkpoint), tokenizer=tokenizer)


def require_same(found: Identity, wanted: Identity, what: str) -> None:
    """Raise `ConfigError` where `what` was made for another target or tokenizer."""
    for name in ("target", "tokenizer"):
        old, new = getattr(found, name), getattr(wanted, name)
        if old != new:
            raise ConfigError(
                f"{what} was made for another {name}: its SHA-256 is {old[:12]}…, that of the "
                f"{name} given now {new[:12]}…. Give the target that it was made for, or make it "
                "again in another place."
            )


def _hash_tensors(checkpoint: Checkpoint) -> str:
    """Of all tensors in the order of their names: the same for every form of file."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint.names()):
        digest.update(f"{name} {checkpoint.dtype(name)} {checkpoint.shape(name)}\n".encode())
        digest.update(checkpoint.tensor(name).tobytes())
    return digest.hexdigest()
