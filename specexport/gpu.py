"""The NVIDIA GPU of this machine, asked of its driver: no package is needed for that."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specexport.errors import ConfigError

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # attributes of the driver's API: the parts of the compute capability


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU that this process may use."""

    name: str
    compute_capability: str
    """As in sm89."""
    memory_bytes: int
    cuda_version: str
    """The newest that the driver runs, as in 13.0."""

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.compute_capability}, {self.memory_bytes / 1e9:.0f} GB, "
            f"driver for CUDA {self.cuda_version})"
        )


def find_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> Gpu:
    """Ask the driver, which `load` loads; raises `ConfigError` saying why there is no GPU."""
    try:
        driver = load(_DRIVER)
    except OSError:
        raise ConfigError(f"There is no NVIDIA driver here: {_DRIVER} cannot be loaded.") from None
    _call(driver.cuInit, 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    _call(driver.cuDeviceGetCount, ctypes.byref(count))
    if count.value == 0:
        raise ConfigError("The NVIDIA driver shows no GPU. Is CUDA_VISIBLE_DEVICES empty?")
    _call(driver.cuDeviceGet, ctypes.byref(device), 0)
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    _call(driver.cuDeviceGetName, name, len(name), device)
    _call(driver.cuDeviceTotalMem_v2, ctypes.byref(memory), device)
    version = ctypes.c_int()
    _call(driver.cuDriverGetVersion, ctypes.byref(version))
    major, minor = (_attribute(driver, device, which) for which in (_MAJOR, _MINOR))
    cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return Gpu(name.value.decode(), f"sm{major}{minor}", memory.value, cuda_version)


def local_gpu() -> str | None:
    """The compute capability of the GPU here, as sm89; None without one."""
    try:
        return find_gpu().compute_capability
    except ConfigError:
        return None


def _attribute(driver: Any, device: ctypes.c_int, which: int) -> int:  # noqa: ANN401 - a C library
    value = ctypes.c_int()
    _call(driver.cuDeviceGetAttribute, ctypes.byref(value), which, device)
    return value.value


def _call(function: Any, *arguments: Any) -> None:  # noqa: ANN401 - a C library
    if status := function(*arguments):
        raise ConfigError(
            f"The NVIDIA driver is here but answers with CUDA error {status}"
            f"{' (no device)' if status == 100 else ''}. Does nvidia-smi show a GPU?"
        )
