"""Caches on the stand-in of a GPU, whose memory ONNX Runtime's CPU provider can read."""

import sys

import pytest

from specexport.engines.cuda_cache import CudaCache
from tests.fake_cuda import FakeCuda


class FakeGpuCache(CudaCache):
    """What ONNX Runtime is told to be the CPU's."""

    device = "cpu"


def install_fake_cuda(monkeypatch: pytest.MonkeyPatch, memory_bytes: int = 2**30) -> FakeCuda:
    """In place of the real CUDA runtime."""
    cuda = FakeCuda(memory_bytes)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    return cuda
