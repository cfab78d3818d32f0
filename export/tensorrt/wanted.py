"""What the user asked for, and whether it can be had here."""

from dataclasses import dataclass

from specexport.export.engine_spec import Backend, FloatType
from specexport.export.tensorrt.library import Library, find_library


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """What the user asked for."""

    backend: Backend
    gpus: tuple[str, ...] = ()
    precision: FloatType | None = None
    """Of products, attention and caches; None: as the matrices are stored, fp16 for integers."""
    max_slots: int = 8
    chunk: int = 256
    """Prompt tokens of a row in one step."""
    weight_streaming: bool = False

    def resolve(self) -> tuple[Library, tuple[str, ...]]:
        """The library and the GPUs; raises `ConfigError` where one is missing or unknown."""
        library = find_library(self.backend)
        return library, library.check_gpus(self.gpus)
