"""specexport: export, optimise and run speculative decoding, losslessly.

>>> import specexport
>>> with specexport.Engine("build/demo") as engine:
...     for chunk in engine.submit("Once upon a time", specexport.SamplingParams(max_tokens=32)):
...         print(chunk.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from specexport.errors import (
    BundleError,
    CheckpointError,
    ConfigError,
    EngineError,
    QueueFullError,
    RequestError,
    SpecExportError,
)

if TYPE_CHECKING:
    from specexport.runtime.async_engine import AsyncEngine
    from specexport.runtime.async_stream import AsyncStream, AsyncStreamGroup
    from specexport.runtime.engine import Engine
    from specexport.runtime.logprobs import Logprob, TokenLogprobs
    from specexport.runtime.options import EngineOptions
    from specexport.runtime.output import Chunk, Completion
    from specexport.runtime.params import SamplingParams
    from specexport.runtime.request import FinishReason
    from specexport.runtime.stats import AcceptanceStats, EngineStats, RequestStats
    from specexport.runtime.stream import Stream, StreamGroup
    from specexport.runtime.structure import Choice, Grammar, JsonSchema, Regex

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "AsyncEngine",
    "AsyncStream",
    "AsyncStreamGroup",
    "BundleError",
    "CheckpointError",
    "Choice",
    "Chunk",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineError",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "Grammar",
    "JsonSchema",
    "Logprob",
    "QueueFullError",
    "Regex",
    "RequestError",
    "RequestStats",
    "SamplingParams",
    "SpecExportError",
    "Stream",
    "StreamGroup",
    "TokenLogprobs",
    "__version__",
]

# Loaded when first used, so that `import specexport` and `specexport --help` stay fast.
_HOMES = {
    "AsyncEngine": "async_engine",
    **dict.fromkeys(("AsyncStream", "AsyncStreamGroup"), "async_stream"),
    "Engine": "engine",
    **dict.fromkeys(("Logprob", "TokenLogprobs"), "logprobs"),
    **dict.fromkeys(("Chunk", "Completion"), "output"),
    **dict.fromkeys(("Stream", "StreamGroup"), "stream"),
    "EngineOptions": "options",
    "SamplingParams": "params",
    "FinishReason": "request",
    **dict.fromkeys(("Choice", "Grammar", "JsonSchema", "Regex"), "structure"),
    **dict.fromkeys(("AcceptanceStats", "EngineStats", "RequestStats"), "stats"),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module holds
    if name not in _HOMES:
        raise AttributeError(f"module 'specexport' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"specexport.runtime.{_HOMES[name]}"), name)
