"""The engines by name, and the one thing that each still needs on this machine."""

import ctypes
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast, get_args

import onnxruntime as ort

from specexport.errors import ConfigError
from specexport.export.engine_spec import Backend
from specexport.gpu import find_gpu
from specexport.nvidia_library import INSTALL, MODULES

EngineName = Literal[
    "onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt", "tensorrt", "tensorrt-rtx"
]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

_OLDEST = (1, 31)
"""Of onnxruntime-gpu: older ones lack `TensorScatter` or `Attention` of opset 24 on CUDA."""
_PROVIDERS = {"onnxruntime-cuda": "CUDA", "onnxruntime-tensorrt": "TensorRT"}


@dataclass(frozen=True, slots=True)
class Missing:
    """What keeps an engine from running here."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


def missing(engine: EngineName) -> Missing | None:
    """The first thing that the engine lacks on this machine; None where it can run."""
    return next(_lacks(engine), None)


def check_available(engine: EngineName) -> None:
    """Raise `ConfigError` with what is missing unless the engine can run here."""
    if lack := missing(engine):
        raise ConfigError(f"The engine {engine} cannot run here: {lack}")


def _lacks(engine: EngineName) -> Iterator[Missing]:
    """Lazily: a library is loaded only where a GPU is there to use it."""
    if engine == "onnxruntime":
        return
    try:
        find_gpu()
    except ConfigError as error:
        yield Missing(str(error).rstrip("."), "Use onnxruntime, which needs no GPU.")
    if provider := _PROVIDERS.get(engine):
        yield from _provider_lacks(provider)
    else:
        backend = cast(Backend, engine)
        if find_spec(MODULES[backend]) is None:
            yield Missing(f"the package {MODULES[backend]} is not installed", INSTALL[backend])
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        yield Missing("the package cuda-bindings is not installed", "pip install cuda-bindings")


def _provider_lacks(provider: str) -> Iterator[Missing]:
    """Of ONNX Runtime's CUDA and TensorRT providers; the second wants all of the first."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        yield Missing(
            f"onnxruntime {ort.__version__} is the package for CPUs",
            "The two share a folder, so: pip uninstall onnxruntime, then "
            "pip install --force-reinstall 'onnxruntime-gpu[cuda,cudnn]'",
        )
    found = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if found < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        yield Missing(
            f"onnxruntime-gpu {ort.__version__} is installed, and {wanted} or newer is needed",
            f"pip install 'onnxruntime-gpu[cuda,cudnn]>={wanted}'",
        )
    with redirect_stdout(io.StringIO()):  # what it cannot load is told by the next lines
        ort.preload_dlls()
    if reason := _why_not_loaded("cuda"):
        yield Missing(
            f"a library of CUDA cannot be loaded ({reason})",
            "pip install 'onnxruntime-gpu[cuda,cudnn]', or install CUDA's own packages",
        )
    if provider == "TensorRT" and (reason := _why_not_loaded("tensorrt")):
        yield Missing(
            f"a library of TensorRT cannot be loaded ({reason})",
            "Install the version of TensorRT that this ONNX Runtime was linked to; its packages "
            "come from NVIDIA's own index",
        )


def _why_not_loaded(provider: Literal["cuda", "tensorrt"]) -> str | None:
    """The loader's reason; None where the provider's library and all that it links load."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        # In this order, and for all to see: a provider calls into the library that they share.
        for name in ("shared", provider):
            ctypes.CDLL(str(folder / f"libonnxruntime_providers_{name}.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return None


def onnxruntime_version() -> str:
    """With the name of the package, which is one of two."""
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"onnxruntime {ort.__version__}"
