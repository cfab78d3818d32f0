"""The GPU of this machine, asked of a driver that is a stand-in, and of the real one."""

import ctypes
from typing import Any

import pytest

from specexport.errors import ConfigError
from specexport.gpu import find_gpu, local_gpu


class FakeDriver:
    """A machine whose driver shows one GPU, or answers with an error."""

    def __init__(self, num_gpus: int = 1, status: int = 0) -> None:
        self._num_gpus, self._status = num_gpus, status

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._num_gpus
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA Fake"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = 24 * 10**9
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:
        value._obj.value = {75: 8, 76: 9}[which]
        return 0


def test_the_gpu_is_described() -> None:
    gpu = find_gpu(lambda name: FakeDriver())
    assert str(gpu) == "NVIDIA Fake (sm89, 24 GB, driver for CUDA 12.8)"


def test_a_machine_without_a_driver_says_so() -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    with pytest.raises(ConfigError, match="There is no NVIDIA driver here"):
        find_gpu(load)


def test_a_driver_without_a_gpu_says_so() -> None:
    with pytest.raises(ConfigError, match=r"shows no GPU\. Is CUDA_VISIBLE_DEVICES empty"):
        find_gpu(lambda name: FakeDriver(num_gpus=0))


def test_a_driver_that_fails_gives_its_error() -> None:
    with pytest.raises(ConfigError, match=r"CUDA error 100 \(no device\)"):
        find_gpu(lambda name: FakeDriver(status=100))


@pytest.mark.gpu
def test_the_gpu_here_is_found() -> None:
    gpu = find_gpu()
    assert gpu.name
    assert gpu.memory_bytes > 2**30
    assert local_gpu() == gpu.compute_capability
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
