"""What an engine lacks on a machine, one thing at a time; the machines are stand-ins."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from specexport.engines import available, ort_session
from specexport.engines.available import ENGINES, check_available, missing
from specexport.engines.backend import open_backend
from specexport.errors import ConfigError, EngineError
from specexport.export.manifest import read_manifest
from specexport.gpu import Gpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One that has all; tests take something away."""
    monkeypatch.setattr(available, "find_gpu", lambda: Gpu("fake", "sm89", 2**30, "13.0"))
    providers = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    monkeypatch.setattr(available, "_why_not_loaded", lambda provider: None)
    monkeypatch.setattr(available, "find_spec", lambda name: SimpleNamespace(name=name))
    return monkeypatch


def _lack(engine: Any) -> str:
    return str(missing(engine))


@pytest.mark.usefixtures("machine")
def test_where_everything_is_there_every_engine_runs() -> None:
    assert [missing(engine) for engine in ENGINES] == [None] * 5
    check_available("onnxruntime-tensorrt")


def test_without_a_gpu_all_but_the_cpu_say_so_first(machine: pytest.MonkeyPatch) -> None:
    def find() -> Gpu:
        raise ConfigError("The NVIDIA driver shows no GPU.")

    machine.setattr(available, "find_gpu", find)
    machine.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert missing("onnxruntime") is None
    for engine in ENGINES[1:]:
        assert _lack(engine) == (
            "The NVIDIA driver shows no GPU. Use onnxruntime, which needs no GPU."
        )


def test_the_package_for_cpus_is_named_with_the_one_that_is_needed(
    machine: pytest.MonkeyPatch,
) -> None:
    machine.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ConfigError, match=r"cannot run here: onnxruntime 1\.31\.1 is the package "):
        check_available("onnxruntime-cuda")
    assert "pip uninstall onnxruntime" in _lack("onnxruntime-tensorrt")
    assert missing("tensorrt") is None


def test_an_old_package_is_refused(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(onnxruntime, "__version__", "1.9.2")
    assert "onnxruntime-gpu 1.9.2 is installed, and 1.31 or newer" in _lack("onnxruntime-cuda")


def test_a_library_that_cannot_be_loaded_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(available, "_why_not_loaded", lambda provider: f"lib{provider}.so.13: gone")
    assert "CUDA cannot be loaded (libcuda.so.13: gone)" in _lack("onnxruntime-cuda")
    machine.setattr(
        available, "_why_not_loaded", lambda p: "libnvinfer.so.10: gone" if p != "cuda" else None
    )
    assert missing("onnxruntime-cuda") is None
    assert "TensorRT cannot be loaded (libnvinfer.so.10" in _lack("onnxruntime-tensorrt")


def test_a_package_that_is_not_installed_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(available, "find_spec", lambda name: None if "tensorrt" in name else name)
    assert "tensorrt_rtx is not installed. pip install 'specexport[rtx]'" in _lack("tensorrt-rtx")
    machine.setattr(available, "find_spec", lambda name: None if "cuda" in name else name)
    assert "cuda-bindings is not installed" in _lack("onnxruntime-cuda")


def test_the_loaders_own_words_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "__init__.py"))
    assert "libonnxruntime_providers_shared.so" in str(available._why_not_loaded("cuda"))


def test_a_bundle_is_refused_before_anything_is_loaded(
    tiny_bundle: Path, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ConfigError, match="onnxruntime-cuda cannot run here"):
        open_backend("onnxruntime-cuda", tiny_bundle, read_manifest(tiny_bundle))


class FakeSession:
    """A session that placed its nodes so."""

    def __init__(self, placed: dict[str, Counter[str]]) -> None:
        self._placed = placed

    def get_providers(self) -> list[str]:
        return list(self._placed)

    def get_provider_graph_assignment_info(self) -> list[Any]:
        def part(name: str, nodes: Counter[str]) -> Any:
            made = [SimpleNamespace(op_type=operator) for operator in nodes.elements()]
            return SimpleNamespace(ep_name=name, get_nodes=lambda: made)

        return [part(name, nodes) for name, nodes in self._placed.items()]


def _check(wanted: str, **placed: Counter[str]) -> None:
    session = FakeSession({f"{name}ExecutionProvider": nodes for name, nodes in placed.items()})
    ort_session._check_providers(session, Path("model.onnx"), f"{wanted}ExecutionProvider")


def test_a_provider_that_was_left_out_silently_is_refused() -> None:
    with pytest.raises(EngineError, match=r"did not use CUDAExecutionProvider .* but only CPU"):
        _check("CUDA", CPU=Counter(MatMul=3))


def test_a_provider_that_took_nothing_is_refused() -> None:
    with pytest.raises(EngineError, match=r"Tensorrt.* took no node .* Use onnxruntime-cuda"):
        _check("Tensorrt", Tensorrt=Counter(), CUDA=Counter(MatMul=3))


def test_caches_that_would_be_copied_at_every_step_are_refused() -> None:
    with pytest.raises(EngineError, match=r"runs TensorScatter of model\.onnx on the CPU"):
        _check("CUDA", CUDA=Counter(MatMul=3, Attention=1), CPU=Counter(TensorScatter=1))


def test_arithmetic_of_shapes_may_stay_on_the_cpu() -> None:
    _check("CUDA", CUDA=Counter(MatMul=3, Attention=1, TensorScatter=2), CPU=Counter(Concat=2))
