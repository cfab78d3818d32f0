"""Files of results: known to be writable before a long run, and whole or not there."""

import os
import tempfile
from pathlib import Path

from specexport.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise `ConfigError` where `write_whole` could not write; changes nothing."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} cannot be written: it is no regular file. Name another file.")
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Name a file in a folder that can be "
            "written to."
        ) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the destination and rename, so that no half-written file is ever seen."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
