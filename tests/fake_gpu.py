"""A machine with a GPU and a library, both fake, and bundles with plans for them."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from specexport.engines import available as available_module
from specexport.engines.tensorrt import backend as backend_module
from specexport.export.engine_spec import Backend, FloatType
from specexport.export.manifest import Manifest
from specexport.export.tensorrt import library as library_module
from specexport.export.tensorrt import maker as maker_module
from specexport.export.tensorrt.engines import add_engines
from specexport.export.tensorrt.wanted import WantedEngine
from specexport.gpu import Gpu
from tests.fake_cuda import FakeCuda
from tests.fake_tensorrt import FakeTensorRT, fake_build

GPU = Gpu("NVIDIA Fake", "sm89", 2**30, "13.0")


@dataclass(frozen=True)
class FakeMachine:
    cuda: FakeCuda
    library: FakeTensorRT
    backend: Backend

    @classmethod
    def install(
        cls, monkeypatch: pytest.MonkeyPatch, backend: Backend, memory_bytes: int = 2**30
    ) -> "FakeMachine":
        """In place of the real driver, CUDA runtime and library."""
        cuda = FakeCuda(memory_bytes)
        library = FakeTensorRT(cuda)
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
        monkeypatch.setitem(sys.modules, backend.replace("-", "_"), library)
        for module in (available_module, backend_module):
            monkeypatch.setattr(module, "find_gpu", lambda: GPU)
        monkeypatch.setattr(available_module, "find_spec", lambda name: name)
        monkeypatch.setattr(library_module, "local_gpu", lambda: GPU.compute_capability)
        monkeypatch.setattr(maker_module, "build_plan", fake_build)
        return cls(cuda, library, backend)

    def add_plans(
        self, bundle: Path, precision: FloatType = "fp32", max_slots: int = 4, chunk: int = 32
    ) -> Manifest:
        """Build plans of all graphs of a bundle; its manifest with them."""
        wanted = WantedEngine(self.backend, ("sm89",), precision, max_slots, chunk)
        return add_engines(bundle, [wanted], lambda what: None)

    def assert_all_freed(self) -> None:
        assert self.cuda.num_blocks("device") == 0
        assert not self.cuda.streams
        assert not self.cuda.graphs
