"""Files that are whole or not there, and one clear error where the disk is full."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specexport import files
from specexport.errors import SpecExportError


@contextmanager
def told_when_full(path: Path) -> Iterator[None]:
    """Turn what the system says of writing `path` into a `SpecExportError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise SpecExportError(f"{path} cannot be written: {error.strerror}.") from None
        raise SpecExportError(
            f"The disk is full: {path} could not be written. What was written before is whole. "
            "Free some space and run the same command again: it goes on from there."
        ) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write beside `path` and rename; raises `SpecExportError` where the disk is full."""
    with told_when_full(path):
        files.write_whole(path, data)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise `SpecExportError` where the disk cannot hold what is still to be written."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise SpecExportError(
            f"{folder} needs {needed_bytes / 1e9:.2f} GB more, and {free_bytes / 1e9:.2f} GB are "
            "free. Free some, name a folder on another disk, or give a smaller --data-budget."
        )


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A place for what is needed for a while, empty at first and gone afterwards."""
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    with told_when_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
