"""A plan that does not fit is refused before it is deserialised, with the command to build."""

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest

from specexport.engines.plan import (
    DeviceMemory,
    build_command,
    check_plan,
    choose_profile,
    find_engine,
    mismatch,
)
from specexport.errors import BundleError, ConfigError
from specexport.export.engine_spec import EngineSpec, PlanSpec, ShapeProfile, SizeRange
from specexport.export.manifest import Manifest, read_manifest

PLAN = b"a plan"


def _profile(name: str, query: int) -> ShapeProfile:
    sizes = {"batch": SizeRange(min=1, opt=2, max=2), "query": SizeRange(min=1, opt=3, max=query)}
    return ShapeProfile(name=name, sizes=sizes)


def _plan(graph_sha256: str) -> PlanSpec:
    return PlanSpec(
        path="engines/tensorrt-rtx-sm89-1.7/target.plan",
        size_bytes=len(PLAN),
        sha256=hashlib.sha256(PLAN).hexdigest(),
        key="0",
        graph_sha256=graph_sha256,
        cache_length=64,
        profiles=(_profile("step", 5), _profile("prefill", 32)),
        num_layers=3,
        build_time_s=0.1,
        peak_memory_mb=1,
    )


@pytest.fixture
def manifest(tiny_bundle: Path) -> Manifest:
    """The tiny bundle with an engine."""
    found = read_manifest(tiny_bundle)
    engine = EngineSpec(
        backend="tensorrt-rtx",
        library_version="1.7",
        gpus=("sm89",),
        precision="fp16",
        weight_streaming=False,
        plans={"target": _plan(found.files["target/model.onnx"].sha256)},
    )
    return found.model_copy(update={"engines": (engine,), "decide": None})


def test_the_engine_of_this_library_and_gpu_is_found(manifest: Manifest) -> None:
    bundle = Path("b")
    assert find_engine(bundle, manifest, "tensorrt-rtx", "1.7", "sm89") is manifest.engines[0]


def test_an_engine_of_another_version_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"built by version 1\.7, and 1\.8 is installed\. Build"):
        find_engine(Path("b"), manifest, "tensorrt-rtx", "1.8", "sm89")


def test_an_engine_for_another_gpu_is_refused_with_the_command(manifest: Manifest) -> None:
    command = "specexport build b --engine tensorrt-rtx --gpu sm120"
    with pytest.raises(ConfigError, match=f"built for sm89, and the GPU is sm120.*{command}"):
        find_engine(Path("b"), manifest, "tensorrt-rtx", "1.7", "sm120")


def test_a_bundle_without_an_engine_says_so(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="the bundle has no tensorrt engine"):
        find_engine(Path("b"), manifest, "tensorrt", "11.0", "sm89")


def test_a_library_that_is_not_installed_is_a_mismatch(manifest: Manifest) -> None:
    assert "not installed here" in str(mismatch(manifest.engines[0], None, None))


def test_a_plan_is_whole_missing_or_changed(manifest: Manifest, tmp_path: Path) -> None:
    (engine,) = manifest.engines
    plan, path = engine.plans["target"], tmp_path / engine.plans["target"].path
    again = build_command(tmp_path, engine)
    with pytest.raises(BundleError, match=f"is missing.*{again}"):
        check_plan(tmp_path, engine, plan)
    path.parent.mkdir(parents=True)
    path.write_bytes(PLAN)
    check_plan(tmp_path, engine, plan)
    path.write_bytes(PLAN[::-1])
    with pytest.raises(BundleError, match=f"was changed after the build.*{again}"):
        check_plan(tmp_path, engine, plan)


def test_the_first_profile_that_takes_a_step_is_chosen(manifest: Manifest) -> None:
    plan = manifest.engines[0].plans["target"]
    assert choose_profile(plan, {"batch": 2, "query": 5}) == 0
    assert choose_profile(plan, {"batch": 1, "query": 6}) == 1


def test_sizes_outside_every_profile_are_refused(manifest: Manifest) -> None:
    plan = manifest.engines[0].plans["target"]
    for sizes in ({"batch": 3, "query": 1}, {"batch": 1, "query": 33}, {"batch": 0, "query": 1}):
        with pytest.raises(ConfigError, match=r"takes no step with batch .* query 1 to 32"):
            choose_profile(plan, sizes)


def test_an_engine_of_another_graph_is_refused_on_reading(
    manifest: Manifest, tmp_path: Path
) -> None:
    (engine,) = manifest.engines
    other = engine.model_copy(update={"plans": {"target": _plan("0" * 64)}})
    manifest.model_copy(update={"engines": (other,)}).write(tmp_path)
    with pytest.raises(
        BundleError, match=r"target\.plan was built from another target/model\.onnx"
    ):
        read_manifest(tmp_path)


def test_an_engine_without_a_plan_of_each_graph_is_refused(
    manifest: Manifest, tmp_path: Path
) -> None:
    (engine,) = manifest.engines
    other = engine.model_copy(update={"plans": {"draft": engine.plans["target"]}})
    manifest.model_copy(update={"engines": (other,)}).write(tmp_path)
    with pytest.raises(BundleError, match=r"plans of \['draft'\]; the graphs are \['target'\]"):
        read_manifest(tmp_path)


def test_the_memory_that_a_gpu_must_have_is_that_of_plans_and_cache_tensors(
    manifest: Manifest, tiny_bundle: Path
) -> None:
    graph = onnx.load(tiny_bundle / manifest.target.path, load_external_data=False).graph
    sizes = {"batch": 2, "cache_length": 64}  # as the plan's profiles and caches have
    caches = [
        np.prod(
            [dim.dim_value or sizes[dim.dim_param] for dim in tensor.type.tensor_type.shape.dim]
        )
        for tensor in graph.input
        if tensor.name.startswith("past_key_values")
    ]
    memory = DeviceMemory.of(manifest, manifest.engines[0])
    assert memory.max_slots == 2
    assert memory.plan_bytes == len(PLAN)
    assert memory.cache_bytes == 2 * sum(caches) > 0  # fp16
    assert memory.total_bytes == memory.plan_bytes + memory.cache_bytes
