"""Plans that cannot run: each is one clear error before anything is allocated."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.engines import available as available_module
from specexport.engines.backend import open_backend
from specexport.engines.step import Profile
from specexport.engines.tensorrt import backend as backend_module
from specexport.engines.tensorrt.backend import TensorRTBackend
from specexport.errors import BundleError, ConfigError, EngineError, SpecExportError
from specexport.export.engine_spec import EngineSpec
from specexport.export.manifest import Manifest
from specexport.runtime.batch import Batch, Row
from tests import fake_tensorrt
from tests.fake_cuda import cudaError_t
from tests.fake_gpu import GPU, FakeMachine
from tests.fake_tensorrt import ACTIVATIONS, FakeEngine
from tests.linked import linked

PROFILE = Profile(max_slots=3, max_length=100, max_query=32, max_nodes=4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine.install(monkeypatch, "tensorrt-rtx")


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return linked(tiny_bundle, tmp_path / "bundle")


@pytest.fixture
def manifest(machine: FakeMachine, bundle: Path) -> Manifest:
    return machine.add_plans(bundle)


def _refused(
    bundle: Path, manifest: Manifest, profile: Profile = PROFILE
) -> tuple[type[SpecExportError], str]:
    with pytest.raises(SpecExportError) as caught:
        TensorRTBackend(bundle, manifest, "tensorrt-rtx").runner("target", profile)
    return caught.type, str(caught.value)


def _changed(manifest: Manifest, **values: Any) -> Manifest:
    engine: EngineSpec = manifest.engines[0].model_copy(update=values)
    return manifest.model_copy(update={"engines": (engine,)})


def test_the_backend_says_what_it_runs_on(bundle: Path, manifest: Manifest) -> None:
    opened = open_backend("tensorrt-rtx", bundle, manifest)
    assert opened.machine == "NVIDIA Fake, tensorrt-rtx 9.9, fp32"


def test_a_machine_without_a_gpu_is_told_so(
    bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_gpu() -> None:
        raise ConfigError("There is no NVIDIA driver here.")

    monkeypatch.setattr(available_module, "find_gpu", find_gpu)
    kind, message = _refused(bundle, manifest)
    assert kind is ConfigError
    assert message == (
        "The engine tensorrt-rtx cannot run here: There is no NVIDIA driver here. Use onnxruntime, "
        "which needs no GPU."
    )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("tensorrt_rtx", "needs the package tensorrt_rtx.*pip install"),
        ("cuda.bindings.runtime", r"cuda-bindings, which cannot be imported.*pip install"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(
    bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=message):
        TensorRTBackend(bundle, manifest, "tensorrt-rtx")


def test_another_gpu_is_refused_with_the_command(
    bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(GPU, compute_capability="sm120")
    monkeypatch.setattr(backend_module, "find_gpu", lambda: other)
    kind, message = _refused(bundle, manifest)
    assert kind is ConfigError
    assert "was built for sm89, and the GPU is sm120" in message
    assert f"specexport build {bundle} --engine tensorrt-rtx --gpu sm120" in message


def test_another_version_is_refused_with_the_command(bundle: Path, manifest: Manifest) -> None:
    kind, message = _refused(bundle, _changed(manifest, library_version="1.0"))
    assert kind is ConfigError
    assert "was built by version 1.0, and 9.9 is installed" in message


def test_a_bundle_without_plans_says_how_to_build_them(
    tiny_bundle: Path, manifest: Manifest
) -> None:
    kind, message = _refused(tiny_bundle, manifest.model_copy(update={"engines": ()}))
    assert kind is ConfigError
    assert "the bundle has no tensorrt-rtx engine" in message


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_plan_is_refused_with_the_command(
    bundle: Path, manifest: Manifest, damage: str
) -> None:
    path = bundle / manifest.engines[0].plans["target"].path
    data = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(data[::-1])
    kind, message = _refused(bundle, manifest)
    assert kind is BundleError
    assert "Build it again: specexport build" in message


def test_a_plan_that_the_library_refuses_gives_its_reason(
    machine: FakeMachine, bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "check_plan", lambda *arguments: None)
    path = bundle / manifest.engines[0].plans["target"].path
    path.unlink()
    path.write_bytes(b"nonsense")
    kind, message = _refused(bundle, manifest)
    assert kind is EngineError
    assert f"tensorrt-rtx 9.9 cannot load {path}: not a plan" in message
    machine.assert_all_freed()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_slots": 5}, "at most 4, and 5 requests were asked for.*--max-slots 5"),
        ({"max_query": 60}, "at most 38, and 60 query tokens of a request.*--step-tokens 60"),
        ({"max_nodes": 300}, "at most 384, and a cache of 432 tokens.*--step-tokens 332"),
        ({"max_length": 257}, "257 tokens was asked for, but target/model.onnx was built for 256"),
    ],
)
def test_more_than_the_plan_takes_is_refused_with_the_command(
    machine: FakeMachine, bundle: Path, manifest: Manifest, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TensorRTBackend(bundle, manifest, "tensorrt-rtx").runner(
            "target", replace(PROFILE, **changes)
        )
    assert "cudaMalloc" not in machine.cuda.calls


def test_too_little_memory_is_refused_before_anything_is_allocated(
    machine: FakeMachine, bundle: Path, manifest: Manifest
) -> None:
    machine.cuda.memory_bytes = 100_000
    kind, message = _refused(bundle, manifest)
    assert kind is ConfigError
    assert "of the GPU's memory (plan 0.00, caches 0.00, buffers 0.00), and 0.00 GB" in message
    assert "--max-slots" in message
    assert "--weight-streaming" in message
    assert not {"cudaMalloc", "cudaHostAlloc"} & set(machine.cuda.calls)


def test_what_is_needed_is_what_is_allocated(
    machine: FakeMachine, bundle: Path, manifest: Manifest
) -> None:
    """The fake's plans take no memory of their own, so the estimate is that much more."""
    plans = manifest.engines[0].plans
    plan_bytes = plans["target"].size_bytes + plans["decide"].size_bytes
    backend = TensorRTBackend(bundle, manifest, "tensorrt-rtx")
    with backend.runner("target", PROFILE):
        used = machine.cuda.used_bytes
    for spare, fits in ((-1, False), (0, True)):
        machine.cuda.memory_bytes = used - 2 * ACTIVATIONS + plan_bytes + spare
        if fits:
            backend.runner("target", PROFILE).close()
        else:
            assert _refused(bundle, manifest)[0] is ConfigError


def test_memory_for_activations_is_asked_for_before_it_is_allocated(
    machine: FakeMachine, bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt, "ACTIVATIONS", 2**40)
    kind, message = _refused(bundle, manifest)
    assert kind is ConfigError
    assert "needs 1099.51 GB of the GPU's memory (activations 1099.51)" in message
    machine.assert_all_freed()


def test_memory_that_another_process_took_meanwhile_is_one_error(
    machine: FakeMachine, bundle: Path, manifest: Manifest
) -> None:
    machine.cuda.fail["cudaMalloc"] = cudaError_t.cudaErrorMemoryAllocation
    kind, message = _refused(bundle, manifest)
    assert kind is ConfigError
    assert "cudaErrorMemoryAllocation" in message
    assert "Lower --max-slots" in message
    machine.assert_all_freed()


def test_streamed_weights_get_what_memory_is_left(
    machine: FakeMachine, bundle: Path, manifest: Manifest
) -> None:
    streamed = _changed(manifest, weight_streaming=True)
    TensorRTBackend(bundle, streamed, "tensorrt-rtx").runner("target", PROFILE).close()
    assert machine.library.engines[-1].weight_streaming_budget_v2 == 12345
    TensorRTBackend(bundle, manifest, "tensorrt-rtx").runner("target", PROFILE).close()
    assert machine.library.engines[-1].weight_streaming_budget_v2 == -1


def test_a_plan_that_copies_its_cache_is_refused(
    machine: FakeMachine, bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "get_aliased_input_tensor", lambda self, name: None)
    kind, message = _refused(bundle, manifest)
    assert kind is EngineError
    assert "does not write present.0.key in place of past_key_values.0.key" in message
    machine.assert_all_freed()


def test_a_cache_whose_slots_are_not_aligned_is_refused_with_the_command(
    bundle: Path, manifest: Manifest
) -> None:
    engine = manifest.engines[0]
    plan = engine.plans["target"].model_copy(update={"cache_length": 383})
    kind, message = _refused(bundle, _changed(manifest, plans={"target": plan}))
    assert kind is ConfigError
    assert "caches of 383 tokens" in message
    assert "Build it again" in message


def test_steps_outside_every_profile_are_refused(bundle: Path, manifest: Manifest) -> None:
    backend = TensorRTBackend(bundle, manifest, "tensorrt-rtx")
    with backend.runner("target", PROFILE) as runner:
        with pytest.raises(ConfigError, match="takes no step with batch 1, query 60"):
            runner.run(Batch.build([Row(0, [1] * 60, 1)], 100).step)
        assert np.isfinite(runner.run(Batch.build([Row(0, [1], 1)], 100).step).logits).all()
