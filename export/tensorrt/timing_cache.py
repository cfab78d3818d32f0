"""What plain TensorRT has measured of its kernels, kept for the next build: its timing cache.

One file for each version of the library and GPU, in the user's cache folder. TensorRT-RTX has none:
it chooses kernels where a plan is loaded, and the calls do nothing there. The file is a SHA-256 and
the library's own bytes: of damaged ones it would make an empty cache without saying so.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specexport.export.tensorrt.library import Library
from specexport.files import user_cache, write_whole

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
    return user_cache() / f"{library.backend}-{library.version}-{gpu}.timing"


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
    data = bytes(cache.serialize())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(data).digest() + data)
    except OSError as error:
        tell(f"The timing cache cannot be kept ({error}); the next build takes as long")
