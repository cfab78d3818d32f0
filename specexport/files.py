"""Files that are whole or not there, and the folder of the user's cache."""

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
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def user_cache() -> Path:
    """Where what can be made again is kept for this user; it need not be there."""
    local = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(local) if local else Path.home() / ".cache") / "specexport"
