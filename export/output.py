"""The folder that a bundle is written to: checked first, then replaced whole or left alone."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specexport.errors import ConfigError, SpecExportError
from specexport.export.manifest import MANIFEST_NAME


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise `ConfigError` if `output` cannot become a bundle."""
    if not output.parent.is_dir():
        raise ConfigError(f"The folder {output.parent} does not exist. Make it, or change -o.")
    if output.exists():
        if not overwrite:
            raise ConfigError(
                f"{output} exists. Give --overwrite to replace it, or another path with -o."
            )
        if not (output / MANIFEST_NAME).is_file():
            raise ConfigError(
                f"{output} exists and is no bundle (no {MANIFEST_NAME}), so --overwrite leaves it "
                "alone. Give another path with -o."
            )


def check_space(output: Path, needed_bytes: int) -> None:
    """Raise `SpecExportError` if the disk has less than `needed_bytes` left."""
    free_bytes = shutil.disk_usage(output.parent).free
    if free_bytes < needed_bytes:
        raise SpecExportError(_disk_full(output, f"{needed_bytes / 1e9:.2f} GB are needed, "))


def _disk_full(output: Path, needed: str) -> str:
    free_bytes = shutil.disk_usage(output.parent).free
    return (
        f"Not enough disk space beside {output}: {needed}{free_bytes / 1e9:.2f} GB are free. "
        "Free some, choose another disk with -o, or store smaller weights (--weights bf16)."
    )


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends well."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise SpecExportError(f"Cannot write beside {output}: {error.strerror}.") from None
    try:
        yield folder
        folder.chmod(0o755)
        _replace(folder, output)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SpecExportError(_disk_full(output, "")) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, output: Path) -> None:
    if output.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent)) / "old"
        os.rename(output, old)
        os.rename(folder, output)
        shutil.rmtree(old.parent)
    else:
        os.rename(folder, output)
