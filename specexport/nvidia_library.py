"""TensorRT and TensorRT-RTX as Python modules with one API, to build plans and to run them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from specexport.errors import ConfigError, EngineError
from specexport.export.engine_spec import Backend

MODULES: dict[Backend, str] = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
INSTALL: dict[Backend, str] = {
    "tensorrt-rtx": "pip install 'specexport[rtx]'",
    "tensorrt": "pip install tensorrt (its packages come from NVIDIA's own index)",
}


def import_library(backend: Backend) -> Any:  # noqa: ANN401 - the library has no types
    """The module; raises `ConfigError` where it is not installed."""
    try:
        return import_module(MODULES[backend])
    except (ImportError, OSError) as error:  # a shared library that is missing, too
        raise ConfigError(
            f"--engine {backend} needs the package {MODULES[backend]}, which cannot be imported "
            f"({error}). Install it with: {INSTALL[backend]}"
        ) from None


@contextmanager
def reasons(module: Any, doing: str) -> Iterator[Any]:  # noqa: ANN401 - the library has no types
    """A logger; an `EngineError` within becomes one with what the library logged meanwhile."""
    logger, errors = _logger(module)
    errors.clear()
    try:
        yield logger
    except EngineError as error:
        why = "; ".join(_shortened(errors)) or str(error)
        raise EngineError(f"{doing}: {why}") from None


@cache
def _logger(module: Any) -> tuple[Any, list[str]]:  # noqa: ANN401 - the library has no types
    """Collects errors. One for the process: the library ignores all but the first."""
    errors = list[str]()

    class Logger(module.ILogger):  # type: ignore[misc] # the library has no types
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:  # noqa: ANN401
            if severity in (module.ILogger.INTERNAL_ERROR, module.ILogger.ERROR):
                errors.append(message)

    return Logger(), errors


def _shortened(errors: list[str], limit: int = 600) -> list[str]:
    """Each reason once, on one line."""
    return [" ".join(error.split())[:limit] for error in dict.fromkeys(errors)]
