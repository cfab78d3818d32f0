"""The folder that a bundle is written to: checked first, then replaced whole or left alone."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specexport.errors import BundleError, ConfigError, SpecExportError
from specexport.export.manifest import read_manifest


def check_output(output: Path, sources: Sequence[str], *, overwrite: bool) -> None:
    """Raise `ConfigError` if `output` cannot become a bundle, or would swallow a source."""
    if not output.parent.is_dir():
        raise ConfigError(f"The folder {output.parent} does not exist. Make it, or change -o.")
    if not output.exists():
        return
    if not overwrite:
        raise ConfigError(
            f"{output} exists. Give --overwrite to replace it, or another path with -o."
        )
    for source in sources:
        if Path(source).expanduser().resolve().is_relative_to(output):
            raise ConfigError(f"{output} holds {source} itself. Give another path with -o.")
    try:
        read_manifest(output)
    except BundleError:
        raise ConfigError(
            f"{output} exists and is no bundle of this version, so --overwrite leaves it alone. "
            "Give another path with -o."
        ) from None


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
        try:
            os.rename(output, old)
            try:
                os.rename(folder, output)
            except OSError:
                os.rename(old, output)
                raise
        finally:
            shutil.rmtree(old.parent)
    else:
        os.rename(folder, output)
