"""What the user asked for, and whether it can be had here."""

from collections.abc import Collection
from dataclasses import dataclass

from specexport.errors import ConfigError
from specexport.export.engine_spec import Backend, FloatType
from specexport.export.manifest import WeightType
from specexport.export.tensorrt.library import Library, find_library

_FIRST_WITH_FP8 = 89


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """What the user asked for."""

    backend: Backend
    gpus: tuple[str, ...] = ()
    precision: FloatType | None = None
    """Of products, attention and caches; None: as the matrices are stored, fp16 for codes."""
    max_slots: int = 8
    chunk: int = 256
    """Prompt tokens of a row in one step."""
    weight_streaming: bool = False

    def resolve(self, stored: Collection[WeightType]) -> tuple[Library, tuple[str, ...]]:
        """The library and the GPUs, for matrices of the types `stored`.

        Raises `ConfigError` where one is missing or unknown, or a GPU lacks a type.
        """
        library = find_library(self.backend)
        gpus = library.check_gpus(self.gpus)
        older = [gpu for gpu in gpus if int(gpu[2:]) < _FIRST_WITH_FP8]
        if older and "fp8" in stored:
            raise ConfigError(
                f"Matrices stored as fp8 need GPUs of sm{_FIRST_WITH_FP8} and up, and the engine "
                f"is for {', '.join(older)}. Leave {'it' if len(older) == 1 else 'them'} out, or "
                "store the matrices as int8 (--precision int8)."
            )
        return library, gpus
