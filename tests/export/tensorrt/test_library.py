"""What is installed, and which GPUs may be named; with stand-ins, so that it runs anywhere."""

import sys
from types import SimpleNamespace

import pytest

from specexport.errors import ConfigError
from specexport.export.tensorrt.library import Library, find_library
from specexport.gpu import Gpu, local_gpu


def _library(backend: str) -> Library:
    module = SimpleNamespace(ComputeCapability=SimpleNamespace(CURRENT=0, SM89=1, SM120=2))
    return Library(backend, module, "1.2.3")  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with a GPU of compute capability 8.9."""
    monkeypatch.setattr("specexport.gpu.find_gpu", lambda: Gpu("fake", "sm89", 1, "13.0"))
    return "sm89"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Gpu:
        raise ConfigError("none")

    monkeypatch.setattr("specexport.gpu.find_gpu", find)


@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt"])
def test_a_library_that_is_missing_is_named_with_its_remedy(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, backend.replace("-", "_"), None)
    with pytest.raises(ConfigError, match=f"--engine {backend} needs .* Install it with: pip"):
        find_library(backend)  # type: ignore[arg-type]


def test_gpus_are_sorted_and_named_once() -> None:
    assert _library("tensorrt-rtx").check_gpus(["sm120", "sm89", "sm120"]) == ("sm89", "sm120")


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'sm90'; tensorrt-rtx 1\.2\.3 builds for sm89, sm120"):
        _library("tensorrt-rtx").check_gpus(["sm90"])


def test_building_ahead_of_time_needs_a_gpu_named() -> None:
    with pytest.raises(ConfigError, match="needs --gpu"):
        _library("tensorrt-rtx").check_gpus([])


@pytest.mark.usefixtures("no_gpu")
def test_plain_tensorrt_is_refused_without_a_gpu() -> None:
    assert local_gpu() is None
    with pytest.raises(ConfigError, match=r"there is none\..* --engine tensorrt-rtx"):
        _library("tensorrt").check_gpus([])


def test_plain_tensorrt_builds_for_the_gpu_here_and_no_other(gpu: str) -> None:
    assert _library("tensorrt").check_gpus([]) == (gpu,)
    with pytest.raises(ConfigError, match=r"'sm120'; .* builds for sm89, the GPU here"):
        _library("tensorrt").check_gpus(["sm120"])
