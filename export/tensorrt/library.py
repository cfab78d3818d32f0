"""TensorRT and TensorRT-RTX: which is installed, and the GPUs that it builds for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specexport.errors import ConfigError
from specexport.export.engine_spec import Backend
from specexport.gpu import local_gpu
from specexport.nvidia_library import import_library


@dataclass(frozen=True, slots=True)
class Library:
    """An installed library; the two have one Python API."""

    backend: Backend
    module: Any
    version: str

    @property
    def is_ahead_of_time(self) -> bool:
        """Whether it builds for GPUs that are not there."""
        return self.backend == "tensorrt-rtx"

    def compute_capability(self, gpu: str) -> Any:  # noqa: ANN401 - the library has no types
        """The library's own name of `gpu`."""
        return getattr(self.module.ComputeCapability, gpu.upper())

    def gpus(self) -> list[str]:
        """What it builds for here: sm89, …; without a GPU, nothing for plain TensorRT."""
        if not self.is_ahead_of_time:
            return [gpu for gpu in [local_gpu()] if gpu is not None]
        known = dir(self.module.ComputeCapability)
        names = [name.lower() for name in known if name.startswith("SM")]
        return sorted(names, key=lambda name: int(name[2:]))

    def check_gpus(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """The GPUs to build for; raises `ConfigError` for one that is not known, or not here."""
        known = self.gpus()
        if not known:
            raise ConfigError(
                "TensorRT builds for the GPU of this machine, and there is none. Build "
                "there, or ahead of time with --engine tensorrt-rtx."
            )
        if not wanted and self.is_ahead_of_time:
            raise ConfigError(
                f"--engine {self.backend} needs --gpu, the GPUs to build for: any of "
                f"{', '.join(known)}, as in --gpu sm89,sm120."
            )
        for gpu in wanted:
            if gpu not in known:
                raise ConfigError(
                    f"--gpu is {gpu!r}; {self.backend} {self.version} builds for "
                    f"{', '.join(known)}{'' if self.is_ahead_of_time else ', the GPU here'}."
                )
        return tuple(sorted(set(wanted), key=known.index)) or tuple(known)


def find_library(backend: Backend) -> Library:
    """Import it; raises `ConfigError` where it is not installed."""
    module = import_library(backend)
    return Library(backend, module, str(module.__version__))
