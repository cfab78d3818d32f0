"""What `validate --engine` compares, on engines that run here; and what it says without a GPU."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from specexport.engines.available import ENGINES, EngineName
from specexport.engines.backend import open_backend
from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile, StepInput, StepOutput
from specexport.errors import ConfigError
from specexport.export.manifest import read_manifest
from specexport.gpu import Gpu
from specexport.validation import engine_check
from specexport.validation.engine_check import EngineCheck
from specexport.validation.engine_outputs import (
    compare_outputs,
    make_feeds,
    step_outputs,
)
from specexport.validation.report import OutputReport
from tests.gpu import skip_unless_available

TEXTS = [list(range(3, 60)), [7, 8, 9]]
Change = Callable[[StepOutput], StepOutput]


class ChangedRunner(OrtRunner):
    """Another engine that computes something else."""

    change: Change = staticmethod(lambda output: output)

    def run(self, step: StepInput) -> StepOutput:
        return self.change(super().run(step))


def _nan(output: StepOutput) -> StepOutput:
    logits = output.logits.copy()
    logits[0, 0] = np.nan
    return StepOutput(logits, output.hidden_states)


def _compare(bundle: Path, change: Change, *, forgetful: bool = False) -> dict[str, OutputReport]:
    spec = read_manifest(bundle).target
    profile = Profile(max_length=spec.max_length)
    where = bundle / spec.path, spec, profile
    with OrtRunner(*where) as right, ChangedRunner(*where) as other:
        other.change = change
        if forgetful:
            other.read_cache = lambda *entries: np.zeros_like(right.read_cache(*entries))  # type: ignore[method-assign]
        infers = partial(step_outputs, right), partial(step_outputs, other)
        reports = compare_outputs("target", *infers, make_feeds(spec, TEXTS), 1e-3)
    return {report.output: report for report in reports}


def test_an_engine_that_computes_the_same_passes_in_every_output(tiny_bundle: Path) -> None:
    reports = _compare(tiny_bundle, lambda output: output)
    assert list(reports) == ["logits", "cache"]
    for report in reports.values():
        assert report.passed
        assert report.max_relative_diff < 1e-4


def test_the_output_that_is_wrong_is_named_and_the_others_pass(tiny_bundle: Path) -> None:
    reports = _compare(tiny_bundle, lambda output: StepOutput(output.logits * 1.01))
    assert not reports["logits"].passed
    assert reports["logits"].max_relative_diff == pytest.approx(0.01, rel=0.01)
    assert reports["cache"].passed


def test_a_wrong_cache_is_named(tiny_bundle: Path) -> None:
    reports = _compare(tiny_bundle, lambda output: output, forgetful=True)
    assert reports["logits"].passed
    assert not reports["cache"].passed
    assert reports["cache"].max_relative_diff == pytest.approx(1)


def test_one_wrong_text_fails_whatever_comes_after_it(tiny_bundle: Path) -> None:
    seen = []

    def change(output: StepOutput) -> StepOutput:
        seen.append(output)
        return StepOutput(output.logits * (1.5 if len(seen) == 1 else 1))

    assert not _compare(tiny_bundle, change)["logits"].passed


def test_not_a_number_never_passes(tiny_bundle: Path) -> None:
    assert not _compare(tiny_bundle, _nan)["logits"].passed


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Gpu:
        raise ConfigError("There is no NVIDIA driver here.")

    for module in ("specexport.gpu", "specexport.engines.available"):
        monkeypatch.setattr(f"{module}.find_gpu", find)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_plans_are_built_and_the_report_says_which_half_was_proved(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="plans need tensorrt-rtx")
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    check = EngineCheck.of(bundle, "tensorrt-rtx", ("sm89",), "fp16")
    report = check.run(TEXTS)
    assert report.passed
    assert report.compared_on is None
    assert report.outputs == ()
    proved, not_proved = report.halves()
    assert "built fp16 plans of these very graphs for sm89" in proved
    assert "agrees" not in proved
    assert "NOT compared" in not_proved
    (engine,) = read_manifest(bundle).engines
    before = (bundle / engine.plans["target"].path).stat().st_mtime_ns
    again = EngineCheck.of(bundle, "tensorrt-rtx")  # the bundle has plans, so --gpu may be left out
    assert again.run(TEXTS) == report
    assert (bundle / engine.plans["target"].path).stat().st_mtime_ns == before


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_nothing_of_an_engine_without_plans_could_be_proved(
    tiny_bundle: Path,
) -> None:
    with pytest.raises(ConfigError, match="onnxruntime-cuda cannot run here: There is no NVIDIA"):
        EngineCheck.of(tiny_bundle, "onnxruntime-cuda")


def test_options_of_plans_are_refused_for_other_engines(tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match=r"are for plans of TensorRT; onnxruntime-cuda has none"):
        EngineCheck.of(tiny_bundle, "onnxruntime-cuda", ("sm89",))


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_needs_a_gpu_named(tiny_bundle: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="plans need tensorrt-rtx")
    with pytest.raises(ConfigError, match="needs --gpu"):
        EngineCheck.of(tiny_bundle, "tensorrt-rtx")


def test_an_engine_that_can_run_is_compared_in_every_graph(
    draft_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime on the CPU stands for the engine, and a GPU is said to be there."""
    gpu = Gpu("fake", "sm89", 2**30, "13.0")
    for module in ("specexport.gpu", "specexport.validation.engine_check"):
        monkeypatch.setattr(f"{module}.find_gpu", lambda: gpu)
    monkeypatch.setattr(engine_check, "check_available", lambda engine: None)
    opened = open_backend
    monkeypatch.setattr(
        engine_check, "open_backend", lambda engine, *rest: opened("onnxruntime", *rest)
    )
    report = EngineCheck.of(draft_bundle, "onnxruntime-cuda").run(TEXTS)
    assert report.passed
    assert report.compared_on == str(gpu)
    assert {(output.graph, output.output) for output in report.outputs} == {
        (graph, output) for graph in ("target", "draft") for output in ("logits", "cache")
    }
    assert "NOT" not in "".join(report.halves())


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_every_output_agrees_on_a_gpu(
    draft_bundle: Path, engine: EngineName, tmp_path: Path
) -> None:
    skip_unless_available(engine)
    bundle = tmp_path / "bundle"
    shutil.copytree(draft_bundle, bundle)
    report = EngineCheck.of(bundle, engine).run(TEXTS)
    assert report.compared_on is not None
    assert report.passed, report
