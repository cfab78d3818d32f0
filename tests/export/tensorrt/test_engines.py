"""Plans built ahead of time, for GPUs that are not here: every family, head and weight type."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from specexport.errors import BundleError, ConfigError, EngineError
from specexport.export.build import BuildOptions, build
from specexport.export.engine_spec import PlanSpec
from specexport.export.manifest import FloatType, Manifest, WeightType, read_manifest
from specexport.export.tensorrt import maker
from specexport.export.tensorrt.engines import add_engines, plan_makers
from specexport.export.tensorrt.plan import Plan
from specexport.export.tensorrt.wanted import WantedEngine
from tests.head_bundles import MAKERS
from tests.linked import linked
from tests.tiny import FAMILIES, write_checkpoint

pytest.importorskip("tensorrt_rtx", reason="plans need tensorrt-rtx: pip install 'specexport[rtx]'")

GPUS = ("sm86", "sm89", "sm120")
NEW_GPUS = ("sm89", "sm120")
# Whose first layer is of another kind than the rest.
DENSE_LAYER_FIRST = ("deepseek_v3", "glm4_moe", "ernie4_5_moe")
SMALL = WantedEngine("tensorrt-rtx", GPUS, max_slots=2, chunk=16)
# Of the heads: MLA with a width that fp16 and bf16 do not take.
ONLY_FP32 = "eagle3, ModelOpt, latent attention"


def _silent(what: str) -> None:
    """Nobody is told."""


def _add(bundle: Path, wanted: WantedEngine = SMALL) -> Manifest:
    return add_engines(bundle, [wanted], _silent)


def _wanted(precision: FloatType) -> WantedEngine:
    return replace(SMALL, precision=precision)


def _build(folder: Path, family: str, options: BuildOptions) -> Path:
    """Of widths that codes fit, and of as few layers as show every kind that the family has."""
    layers = 2 if family in DENSE_LAYER_FIRST else 1
    sizes: dict[str, Any] = {
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
    }
    source = write_checkpoint(folder / "checkpoint", family, **sizes)
    build(str(source), folder / "bundle", options)
    return folder / "bundle"


def _plans(
    bundle: Path, wanted: WantedEngine, graphs: Collection[str] = ("target",)
) -> dict[str, PlanSpec]:
    """Of these graphs alone, written beside the bundle."""
    _, makers = plan_makers(bundle, read_manifest(bundle), wanted)
    return {name: makers[name].write(bundle.parent / f"{name}.plan", {}) for name in graphs}


@dataclass(frozen=True)
class Numbers:
    """How matrices are stored, and what a plan computes in."""

    weights: WeightType
    precision: FloatType


SPREAD = (
    Numbers("fp32", "fp16"),
    Numbers("bf16", "bf16"),
    Numbers("int8", "fp16"),
    Numbers("int4", "bf16"),
    Numbers("int8", "bf16"),
    Numbers("int4", "fp16"),
)
FAMILY_NUMBERS = dict(zip(FAMILIES, cycle(SPREAD), strict=False))
HEAD_NUMBERS = dict(zip(MAKERS, cycle(SPREAD), strict=False)) | {ONLY_FP32: Numbers("int8", "fp32")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_builds(family: str, tmp_path: Path) -> None:
    """Each once, for all three GPUs; the pairs of `SPREAD` take turns, so each comes up."""
    numbers = FAMILY_NUMBERS[family]
    bundle = _build(tmp_path, family, BuildOptions(weight_type=numbers.weights))
    assert read_manifest(bundle).target.weight_type == numbers.weights
    plan = _plans(bundle, _wanted(numbers.precision))["target"]
    assert (tmp_path / "target.plan").stat().st_size == plan.size_bytes > 0
    assert plan.num_layers > 50


@pytest.mark.parametrize("name", MAKERS)
def test_every_head_builds(name: str, tmp_path: Path) -> None:
    """Each once, for all three GPUs; the pairs of `SPREAD` take turns, so each comes up.

    Only the head's own graphs: targets are built above.
    """
    numbers = HEAD_NUMBERS[name]
    bundle = _head_bundle(name, numbers.weights, tmp_path)
    graphs = read_manifest(bundle).graphs.keys() - {"target", "decide"}
    plans = _plans(bundle, _wanted(numbers.precision), graphs)
    assert plans
    assert all(plan.size_bytes > 0 for plan in plans.values())


def _head_bundle(name: str, weights: WeightType, folder: Path) -> Path:
    """The tiny bundle of that name with its head stored as `weights`."""
    made = MAKERS[name](folder / "made", "embedding", 0.0)
    manifest = read_manifest(made.path)
    options = BuildOptions(
        manifest.method,
        head=manifest.provenance.head_checkpoint,
        draft_weight_type=weights,
    )
    manifest = build(str(made.checkpoint), folder / "bundle", options)
    heads = (manifest.graphs[graph] for graph in manifest.graphs.keys() - {"target", "decide"})
    assert any(weights in graph.stored_types for graph in heads)
    return folder / "bundle"


def test_heads_of_a_width_that_halves_do_not_take_are_refused(tmp_path: Path) -> None:
    bundle = MAKERS[ONLY_FP32](tmp_path, "embedding", 0.0).path
    with pytest.raises(EngineError, match=r"head\.onnx: Attention .* 46 wide.*--precision fp32"):
        _plans(bundle, _wanted("fp16"), ["head"])
    assert not (tmp_path / "head.plan").exists()


def test_a_graph_that_fails_after_others_leaves_nothing(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_plan(library: object, model: object, path: Path, *rest: object) -> Plan:
        if path.name == "decide.onnx":
            raise EngineError("no kernel")
        return Plan(memoryview(b"a plan"), num_layers=1, build_time_s=1.0, peak_memory_mb=1)

    monkeypatch.setattr(maker, "build_plan", build_plan)
    with pytest.raises(EngineError, match="no kernel"):
        _add(bare)
    assert read_manifest(bare).engines == ()
    assert not (bare / "engines").exists()


@pytest.mark.parametrize(
    ("weights", "embedding", "precision"),
    [
        ("int8", "int8", "fp32"),
        ("int8", "int8", "fp16"),
        ("int8", "int8", "bf16"),
        ("int4", None, "fp32"),
        ("fp8", "fp8", "fp32"),
        ("fp8", "fp8", "fp16"),
        ("fp8", None, "bf16"),
    ],
)
def test_weights_of_codes_build(
    weights: WeightType, embedding: WeightType | None, precision: FloatType, tmp_path: Path
) -> None:
    """Those pairs that families do not have: codes in fp32, tables of codes, and fp8."""
    options = BuildOptions(weight_type=weights, embedding_type=embedding)
    bundle = _build(tmp_path, "llama", options)
    gpus = NEW_GPUS if weights == "fp8" else GPUS
    assert _plans(bundle, replace(_wanted(precision), gpus=gpus))["target"].num_layers > 50


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latent_attention_build_with_fp8_weights(family: str, tmp_path: Path) -> None:
    bundle = _build(tmp_path, family, BuildOptions(weight_type="fp8"))
    assert _plans(bundle, replace(_wanted("fp16"), gpus=NEW_GPUS))["target"].num_layers > 50


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
    bundle = _build(tmp_path, "llama", BuildOptions(weight_type=weights))
    engine, _ = plan_makers(bundle, read_manifest(bundle), SMALL)
    assert engine.precision == precision


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with an engine."""
    output = tmp_path_factory.mktemp("engines") / "bundle"
    build(str(tiny_checkpoint), output, BuildOptions(engines=(SMALL,)))
    return output


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy of the bundle with an engine, of hard links."""
    return linked(built, tmp_path / "bundle")


@pytest.fixture
def bare(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, which has no engine, of hard links."""
    return linked(tiny_bundle, tmp_path / "bundle")


def test_a_bundle_is_built_with_its_engines(built: Path) -> None:
    (engine,) = read_manifest(built).engines
    assert (engine.gpus, engine.precision) == (GPUS, "fp32")
    assert engine.plans.keys() == {"target", "decide"}
    for plan in engine.plans.values():
        assert (built / plan.path).stat().st_size == plan.size_bytes


def test_engines_of_several_kinds_stand_side_by_side(bundle: Path) -> None:
    manifest = _add(bundle, replace(SMALL, gpus=("sm89",), weight_streaming=True))
    assert [engine.gpus for engine in manifest.engines] == [GPUS, ("sm89",)]
    assert [engine.weight_streaming for engine in manifest.engines] == [False, True]
    assert len(list(bundle.glob("engines/*/target.plan"))) == 2


# Two builds of one graph differ in some bytes, so equal plans are one plan.
def test_a_plan_of_the_same_things_is_not_built_again(bundle: Path) -> None:
    first = read_manifest(bundle)
    assert _add(bundle) == first


def test_a_bundle_that_is_replaced_lends_its_plans(tiny_checkpoint: Path, bundle: Path) -> None:
    first = read_manifest(bundle)
    again = build(str(tiny_checkpoint), bundle, BuildOptions(engines=(SMALL,), overwrite=True))
    assert again.engines == first.engines


CHANGES: dict[str, Callable[[WantedEngine], WantedEngine]] = {
    "more slots": lambda wanted: replace(wanted, max_slots=3),
    "another precision": lambda wanted: replace(wanted, precision="fp16"),
    "weights streamed": lambda wanted: replace(wanted, weight_streaming=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_of_other_options_is_built_and_takes_the_place(bundle: Path, change: str) -> None:
    first = read_manifest(bundle)
    second = _add(bundle, CHANGES[change](SMALL))
    assert len(second.engines) == 1
    assert second.engines[0].plans["target"].key != first.engines[0].plans["target"].key


def test_a_damaged_plan_is_built_again(bundle: Path) -> None:
    first = read_manifest(bundle).engines[0].plans["target"]
    (bundle / first.path).unlink()  # a hard link
    (bundle / first.path).write_bytes(b"damaged")
    second = _add(bundle).engines[0].plans["target"]
    assert second.key == first.key
    assert (bundle / second.path).stat().st_size == second.size_bytes


def test_reasons_of_the_library_are_the_error_and_the_bundle_stays(bare: Path) -> None:
    before = (bare / "manifest.json").read_bytes()
    with pytest.raises(EngineError, match=r"cannot build target/model\.onnx: .*sm75.*b16"):
        _add(bare, replace(SMALL, gpus=("sm75",), precision="bf16"))
    assert (bare / "manifest.json").read_bytes() == before
    assert not (bare / "engines").exists()


def test_a_changed_graph_is_not_built(bare: Path) -> None:
    path = bare / "target/model.weights"
    data = bytearray(path.read_bytes())
    path.unlink()  # a hard link
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.weights was changed after the build"):
        _add(bare)
