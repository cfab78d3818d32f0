"""What plain TensorRT has measured of its kernels, kept for the next build: its timing cache.

One file for each version of the library and GPU, in the user's cache folder. TensorRT-RTX has none:
it chooses kernels where a plan is loaded, and the calls do nothing there. The file is a SHA-256 and
the library's own bytes: of damaged ones it would make an empty cache without saying so.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specexport.export.tensorrt.library import Library

_DIGEST_BYTES = 32

Told = Callable[[str], None]
"""Called with what a person should know."""


@contextmanager
def timing_cache(library: Library, config: Any, gpu: str, tell: Told) -> Iterator[None]:  # noqa: ANN401 - the library has no types
    """A build within, by `config`, uses what earlier ones measured; afterwards it is kept.

    A file that the library does not take, or that cannot be read or written, costs time alone: it
    is told, and the build goes on.
    """
    if library.is_ahead_of_time:
        yield
        return
    path = timing_cache_path(library, gpu)
    if not _attach(config, _read(path, tell)):
        tell(f"{path} is of another library or GPU; the timing cache is made anew")
        _attach(config, b"")
    yield
    _keep(config, path, tell)


def timing_cache_path(library: Library, gpu: str) -> Path:
    """The file for this version and GPU; it need not be there."""
    local = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    folder = Path(local) if local else Path.home() / ".cache"
    return folder / "specexport" / f"{library.backend}-{library.version}-{gpu}.timing"


def _read(path: Path, tell: Told) -> bytes:
    """What the library wrote; empty where there is no file, or none that can be used."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        tell(f"The timing cache cannot be read ({error}); the build takes longer")
        return b""
    digest, data = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        tell(f"{path} is damaged; the timing cache is made anew")
        return b""
    return data


def _attach(config: Any, data: bytes) -> bool:  # noqa: ANN401 - the library has no types
    """Whether the library takes the cache; without data it makes an empty one."""
    cache = config.create_timing_cache(data)
    return cache is not None and config.set_timing_cache(cache, ignore_mismatch=False)


def _keep(config: Any, path: Path, tell: Told) -> None:  # noqa: ANN401 - the library has no types
    """Write the cache, whole or not at all."""
    if (cache := config.get_timing_cache()) is None:
        return
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = bytes(cache.serialize())
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        temporary.replace(path)
    except OSError as error:
        tell(f"The timing cache cannot be kept ({error}); the next build takes as long")
        with suppress(OSError):
            temporary.unlink()
