"""The timing cache against a stand-in for plain TensorRT, which is not here; it ran on no GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

from specexport.export.engine_spec import Backend
from specexport.export.tensorrt.library import Library
from specexport.export.tensorrt.plan import PlanOptions, build_plan
from specexport.export.tensorrt.timing_cache import timing_cache, timing_cache_path


class FakeCache:
    """What was measured, as words."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data


class FakeConfig:
    """A builder's configuration: of damaged bytes it makes an empty cache, as the library does."""

    def __init__(self, *, takes: bytes = b"") -> None:
        self._takes = takes
        self.cache: FakeCache | None = None

    def create_timing_cache(self, data: bytes) -> FakeCache:
        return FakeCache(data)

    def set_timing_cache(self, cache: FakeCache, *, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch  # another GPU's measurements would be wrong
        if not cache.data.startswith(self._takes) and cache.data:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> FakeCache | None:
        return self.cache


def library(backend: Backend = "tensorrt", version: str = "11.4.0") -> Library:
    return Library(backend, SimpleNamespace(), version)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    return tmp_path / "specexport"


def measure(words: bytes, gpu: str = "sm89", **options: Any) -> tuple[bytes, list[str]]:
    """Build once: what the build began with, and what was told. It measures `words` besides."""
    config, told = FakeConfig(**options), list[str]()
    with timing_cache(library(), config, gpu, told.append):
        assert config.cache is not None
        began = config.cache.data
        config.cache.data += words
    return began, told


def test_a_build_begins_with_what_earlier_ones_measured(folder: Path) -> None:
    assert measure(b"one ") == (b"", [])
    assert measure(b"two ") == (b"one ", [])
    assert measure(b"") == (b"one two ", [])
    assert [path.name for path in folder.iterdir()] == ["tensorrt-11.4.0-sm89.timing"]


def test_each_gpu_and_version_has_a_file_of_its_own() -> None:
    measure(b"one ")
    assert measure(b"", gpu="sm120") == (b"", [])
    paths = {
        timing_cache_path(library(version=v), g) for v in ("11.4.0", "11.5") for g in ("a", "b")
    }
    assert len(paths) == 4


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 40])
def test_a_damaged_file_is_told_and_made_anew(damage: bytes) -> None:
    measure(b"one ")
    path = timing_cache_path(library(), "sm89")
    path.write_bytes(damage)
    assert measure(b"two ") == (b"", [f"{path} is damaged; the timing cache is made anew"])
    assert measure(b"") == (b"two ", [])


def test_a_changed_byte_is_damage() -> None:
    measure(b"one ")
    path = timing_cache_path(library(), "sm89")
    path.write_bytes(path.read_bytes()[:-2] + b"! ")
    assert measure(b"")[0] == b""


def test_a_cache_that_the_library_refuses_is_told_and_made_anew() -> None:
    measure(b"other GPU ")
    began, (told,) = measure(b"this GPU ", takes=b"this")
    assert began == b""
    assert "is of another library or GPU" in told
    assert measure(b"", takes=b"this") == (b"this GPU ", [])


def test_a_folder_that_cannot_be_written_stops_no_build(folder: Path) -> None:
    folder.write_text("a file")
    cannot_be_read, cannot_be_kept = measure(b"one ")[1]
    assert cannot_be_read.startswith("The timing cache cannot be read")
    assert cannot_be_kept.startswith("The timing cache cannot be kept")


def test_a_build_that_fails_keeps_what_was_there() -> None:
    measure(b"one ")
    config = FakeConfig()
    with (
        pytest.raises(KeyboardInterrupt),
        timing_cache(library(), config, "sm89", lambda what: None),
    ):
        raise KeyboardInterrupt
    assert measure(b"") == (b"one ", [])


def test_tensorrt_rtx_has_no_timing_cache(folder: Path) -> None:
    config = SimpleNamespace()  # any call would fail
    with timing_cache(library("tensorrt-rtx"), config, "sm89", lambda what: None):
        pass
    assert not folder.exists()


class FakeModule:
    """As much of the library as `build_plan` calls; a plan is the cache that the build had."""

    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)

    class ILogger:
        ERROR, INTERNAL_ERROR = range(2)

    class OnnxParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self.num_errors = 0

        def parse(self, model: bytes, path: str) -> bool:
            return True

    class Builder:
        def __init__(self, logger: Any) -> None:
            """Nothing is needed of it."""

        def create_network(self, flags: int) -> Any:
            return SimpleNamespace(num_layers=3)

        def create_builder_config(self) -> FakeConfig:
            return FakeConfig()

        def build_serialized_network(self, network: Any, config: FakeConfig) -> bytes:
            assert config.cache is not None
            plan, config.cache.data = b"with: " + config.cache.data, b"measured"
            return plan


def test_a_plan_is_built_with_the_cache_and_leaves_it() -> None:
    fake = Library("tensorrt", FakeModule(), "11.4.0")
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}), ir_version=11)
    options, path = PlanOptions(("sm89",), ()), Path("target/model.onnx")
    plans = [build_plan(fake, model, path, options, lambda what: None) for _ in range(2)]
    assert [bytes(plan.data) for plan in plans] == [b"with: ", b"with: measured"]
