"""Plans built ahead of time, for GPUs that are not here: every family, head and weight type."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specexport.errors import BundleError, ConfigError, EngineError
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import FloatType, Manifest, WeightType, read_manifest
from specexport.export.tensorrt.engines import add_engines, plan_makers
from specexport.export.tensorrt.wanted import WantedEngine
from tests.head_bundles import MAKERS
from tests.linked import linked
from tests.tiny import FAMILIES, write_checkpoint

pytest.importorskip("tensorrt_rtx", reason="plans need tensorrt-rtx: pip install 'specexport[rtx]'")

GPUS = ("sm86", "sm89", "sm120")
NEW_GPUS = ("sm89", "sm120")
SMALL = WantedEngine("tensorrt-rtx", GPUS, max_slots=2, chunk=16)
# Of the heads: MLA with a width that fp16 and bf16 do not take.
ONLY_FP32 = "eagle3, ModelOpt, latent attention"


def _silent(what: str) -> None:
    """Nobody is told."""


def _add(bundle: Path, wanted: WantedEngine = SMALL) -> Manifest:
    return add_engines(bundle, [wanted], _silent)


def _wanted(precision: FloatType) -> WantedEngine:
    return replace(SMALL, precision=precision)


def _build(folder: Path, family: str, options: BuildOptions, **sizes: Any) -> Path:
    source = write_checkpoint(folder / "checkpoint", family, **sizes)
    build(str(source), folder / "bundle", options)
    return folder / "bundle"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_builds(family: str, precision: FloatType, tmp_path: Path) -> None:
    bundle = _build(tmp_path, family, BuildOptions())
    _add(bundle, _wanted(precision))
    (engine,) = read_manifest(bundle).engines
    plan = engine.plans["target"]
    assert (engine.gpus, engine.precision) == (GPUS, precision)
    assert (bundle / plan.path).stat().st_size == plan.size_bytes > 0
    assert plan.num_layers > 100


@pytest.mark.parametrize("name", MAKERS)
def test_every_head_builds(name: str, tmp_path: Path) -> None:
    bundle = MAKERS[name](tmp_path, "embedding", 0.0).path
    manifest = read_manifest(bundle)
    for precision in _precisions(name):
        _, makers = plan_makers(bundle, manifest, _wanted(precision))
        for graph in makers.keys() - {"target"}:
            plan = makers[graph].write(tmp_path / f"{graph}-{precision}.plan", {})
            assert plan.size_bytes > 0


def _precisions(name: str) -> tuple[FloatType, ...]:
    return ("fp32",) if name == ONLY_FP32 else ("fp16", "bf16")


def test_heads_of_a_width_that_halves_do_not_take_are_refused(tmp_path: Path) -> None:
    bundle = MAKERS[ONLY_FP32](tmp_path, "embedding", 0.0).path
    with pytest.raises(EngineError, match=r"head\.onnx: Attention .* 46 wide.*--precision fp32"):
        _add(bundle, _wanted("fp16"))
    assert read_manifest(bundle).engines == ()
    assert not (bundle / "engines").exists()


@pytest.mark.parametrize(
    ("weights", "embedding"), [("int8", "int8"), ("int4", None), ("fp8", "fp8"), ("fp8", None)]
)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_weights_of_codes_build(
    weights: WeightType, embedding: WeightType | None, precision: FloatType, tmp_path: Path
) -> None:
    options = BuildOptions(weight_type=weights, embedding_type=embedding)
    bundle = _build(tmp_path, "llama", options, intermediate_size=64)
    gpus = NEW_GPUS if weights == "fp8" else GPUS
    wanted = replace(_wanted(precision), gpus=gpus)
    assert _add(bundle, wanted).engines[0].precision == precision


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latent_attention_build_with_fp8_weights(family: str, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32}
    bundle = _build(tmp_path, family, BuildOptions(weight_type="fp8"), **sizes)
    assert _add(bundle, replace(SMALL, gpus=NEW_GPUS)).engines[0].precision == "fp16"


def test_fp8_weights_are_refused_for_older_gpus_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "llama")
    message = r"stored as fp8 need GPUs of sm89 and up, and the engine is for sm80, sm86\. Leave"
    wanted = replace(SMALL, gpus=("sm86", "sm120", "sm80"))
    with pytest.raises(ConfigError, match=message):
        build(str(source), tmp_path / "x", BuildOptions(embedding_type="fp8", engines=(wanted,)))
    assert not (tmp_path / "x").exists()
    build(str(source), tmp_path / "bundle", BuildOptions(lm_head_type="fp8"))
    with pytest.raises(ConfigError, match=message):
        _add(tmp_path / "bundle", wanted)
    assert not (tmp_path / "bundle/engines").exists()


@pytest.mark.parametrize(
    ("weights", "precision"), [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "fp16")]
)
def test_plans_compute_as_weights_are_stored_unless_told_otherwise(
    weights: WeightType, precision: FloatType, tmp_path: Path
) -> None:
    bundle = _build(tmp_path, "llama", BuildOptions(weight_type=weights), intermediate_size=64)
    assert _add(bundle).engines[0].precision == precision


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, of hard links."""
    return linked(tiny_bundle, tmp_path / "bundle")


def test_a_bundle_is_built_with_its_engines(tiny_checkpoint: Path, tmp_path: Path) -> None:
    options = BuildOptions(engines=(SMALL,))
    manifest = build(str(tiny_checkpoint), tmp_path / "bundle", options)
    assert read_manifest(tmp_path / "bundle") == manifest
    plans = manifest.engines[0].plans
    assert plans.keys() == {"target", "decide"}
    for plan in plans.values():
        assert (tmp_path / "bundle" / plan.path).stat().st_size == plan.size_bytes


def test_engines_of_several_kinds_stand_side_by_side(bundle: Path) -> None:
    _add(bundle, replace(SMALL, gpus=("sm86",)))
    manifest = _add(bundle, replace(SMALL, gpus=("sm89",), weight_streaming=True))
    assert [engine.gpus for engine in manifest.engines] == [("sm86",), ("sm89",)]
    assert [engine.weight_streaming for engine in manifest.engines] == [False, True]
    assert len(list(bundle.glob("engines/*/target.plan"))) == 2


# Two builds of one graph differ in some bytes, so equal plans are one plan.
def test_a_plan_of_the_same_things_is_not_built_again(bundle: Path) -> None:
    first, second = _add(bundle), _add(bundle)
    assert first == second


def test_a_bundle_that_is_replaced_lends_its_plans(tiny_checkpoint: Path, tmp_path: Path) -> None:
    options = BuildOptions(engines=(SMALL,))
    first = build(str(tiny_checkpoint), tmp_path / "bundle", options)
    again = replace(options, overwrite=True)
    assert build(str(tiny_checkpoint), tmp_path / "bundle", again).engines == first.engines


CHANGES: dict[str, Callable[[WantedEngine], WantedEngine]] = {
    "more slots": lambda wanted: replace(wanted, max_slots=3),
    "another precision": lambda wanted: replace(wanted, precision="fp16"),
    "weights streamed": lambda wanted: replace(wanted, weight_streaming=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_of_other_options_is_built_and_takes_the_place(bundle: Path, change: str) -> None:
    first, second = _add(bundle), _add(bundle, CHANGES[change](SMALL))
    assert len(second.engines) == 1
    assert second.engines[0].plans["target"].key != first.engines[0].plans["target"].key


def test_a_damaged_plan_is_built_again(bundle: Path) -> None:
    first = _add(bundle).engines[0].plans["target"]
    (bundle / first.path).write_bytes(b"damaged")
    second = _add(bundle).engines[0].plans["target"]
    assert second.key == first.key
    assert (bundle / second.path).stat().st_size == second.size_bytes


def test_reasons_of_the_library_are_the_error_and_the_bundle_stays(bundle: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    with pytest.raises(EngineError, match=r"cannot build target/model\.onnx: .*sm75.*b16"):
        _add(bundle, replace(SMALL, gpus=("sm75",), precision="bf16"))
    assert (bundle / "manifest.json").read_bytes() == before
    assert not (bundle / "engines").exists()


def test_a_changed_graph_is_not_built(bundle: Path) -> None:
    path = bundle / "target/model.weights"
    data = bytearray(path.read_bytes())
    path.unlink()  # a hard link
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.weights was changed after the build"):
        _add(bundle)
