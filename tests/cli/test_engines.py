"""Engines at the command line: built with a bundle or for one, shown, and refused."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from specexport.cli import cli
from specexport.engines.available import ENGINES, missing
from specexport.export.manifest import read_manifest
from tests.gpu import why_no_gpu

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx") is None,
    reason="plans need tensorrt-rtx: pip install 'specexport[rtx]'",
)
RTX = ("--engine", "tensorrt-rtx")


def _run(*arguments: str | Path, status: int = 0) -> str:
    """What the command prints, errors included, on lines that are not broken."""
    finished = CliRunner(env={"COLUMNS": "400"}).invoke(cli, list(map(str, arguments)))
    assert finished.exit_code == status, finished.output
    return finished.output


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / "bundle"
    _run("build", tiny_checkpoint, "-o", output, *RTX, "--gpu", "SM89,sm120", "--precision", "fp16")
    return output


@needs_rtx
def test_build_and_inspect_report_the_plans(bundle: Path) -> None:
    shown = _run("inspect", bundle)
    for words in (
        "for sm89, sm120, computes in fp16",
        "weights stored as",
        "peak build memory",
        "step: batch 1 to 8, query 1 to 7",
        "prefill: batch 1 to 8, query 1 to 256",
        "caches of 8 requests",
        "fits tensorrt-rtx as installed here; runs with --engine tensorrt-rtx on a GPU of sm89",
    ):
        assert words in shown
    (engine,) = json.loads(_run("inspect", bundle, "--json"))["manifest"]["engines"]
    assert engine["plans"]["target"]["build_time_s"] > 0


@needs_rtx
@pytest.mark.skipif(not why_no_gpu(), reason="a machine with a GPU runs the plans")
def test_plans_without_a_gpu_are_one_error(bundle: Path) -> None:
    shown = _run("generate", bundle, "hello", *RTX, status=1)
    assert "The engine tensorrt-rtx cannot run here: There is no" in shown
    assert "Traceback" not in shown
    check = next(
        check
        for check in json.loads(_run("doctor", bundle, "--json"))["checks"]
        if check["name"] == "run on tensorrt-rtx"
    )
    assert not check["works"]


@needs_rtx
def test_a_bundle_gets_engines_for_other_gpus(bundle: Path) -> None:
    built = _run("build", bundle, *RTX, "--gpu", "sm86", "--gpu", "sm80", "--max-slots", "2")
    assert "Building the tensorrt-rtx plan of target for sm80, sm86" in built
    assert "step: batch 1 to 2" in built
    assert ("sm80", "sm86") in [engine.gpus for engine in read_manifest(bundle).engines]


@needs_rtx
def test_a_version_that_does_not_fit_is_shown_with_the_command(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    other = tuple(e.model_copy(update={"library_version": "1.0"}) for e in manifest.engines[:1])
    manifest.model_copy(update={"engines": other}).write(bundle)
    try:
        command = f"specexport build {bundle} --engine tensorrt-rtx --gpu sm89,sm120"
        for shown in (_run("inspect", bundle), _run("doctor", bundle)):
            assert "was built by version 1.0" in shown
            assert command in shown
    finally:
        manifest.write(bundle)


@needs_rtx
def test_a_plan_that_was_changed_is_shown(bundle: Path) -> None:
    path = bundle / read_manifest(bundle).engines[0].plans["target"].path
    plan = path.read_bytes()
    try:
        path.write_bytes(plan[:-1])
        assert "was changed after the build" in _run("inspect", bundle)
    finally:
        path.write_bytes(plan)


@needs_rtx
def test_doctor_checks_the_engines_of_a_bundle(bundle: Path) -> None:
    checks = json.loads(_run("doctor", bundle, "--json"))["checks"]
    by_name = {check["name"]: check for check in checks}
    assert by_name["build tensorrt-rtx engines"]["works"]
    for engine in ENGINES[1:]:
        check, lack = by_name[f"run on {engine}"], missing(engine)
        assert check["works"] == (lack is None)
        assert check["detail"] == (lack.what if lack else "can run here")
        assert check["fix"] == (lack.remedy if lack else "")
    assert by_name[f"{bundle}: {read_manifest(bundle).engines[0].folder}"]["works"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "sm89"), "--gpu is for plans of TensorRT. Give --engine tensorrt-rtx"),
        (("--precision", "fp16"), "--precision fp16 is what a plan of TensorRT computes in"),
        (("--engine", "onnxruntime", "--weight-streaming"), "--weight-streaming is for plans"),
        ((), "is a bundle. Give --engine tensorrt-rtx"),
    ],
)
def test_options_of_engines_need_an_engine(
    tiny_bundle: Path, options: tuple[str, ...], message: str
) -> None:
    assert message in _run("build", tiny_bundle, *options, status=1)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_a_precision_of_codes_is_how_matrices_are_stored(
    precision: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for option in ("--precision", "--weights"):
        _run("build", tiny_checkpoint, "-o", tmp_path / option, option, precision)
    found = [read_manifest(tmp_path / option).target for option in ("--precision", "--weights")]
    assert found[0] == found[1]
    assert found[0].weight_type == precision
    both = ("--precision", precision, "--weights", precision)  # says the same twice
    _run("build", tiny_checkpoint, "-o", tmp_path / "both", *both)
    assert read_manifest(tmp_path / "both").target == found[0]


def test_precision_and_weights_that_contradict_each_other_are_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = ("--precision", "int8", "--weights", "int4")
    shown = _run("build", tiny_checkpoint, "-o", tmp_path / "bundle", *options, status=1)
    assert "--precision int8 stores matrices as int8, and --weights int4 as int4" in shown
    assert list(tmp_path.iterdir()) == []


@needs_rtx
def test_plans_of_fp8_weights_compute_in_fp16_or_what_is_chosen(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = ("-o", tmp_path / "bundle", *RTX, "--gpu", "sm89", "--precision", "fp8")
    shown = _run("build", tiny_checkpoint, *options)
    assert "for sm89, computes in fp16" in shown
    assert "fp8, embedding fp32" in shown
    chosen = (*RTX, "--gpu", "sm120", "--precision", "bf16")
    assert "for sm120, computes in bf16" in _run("build", tmp_path / "bundle", *chosen)
    same = (*RTX, "--gpu", "sm121", "--precision", "fp8")
    assert "for sm121, computes in fp16" in _run("build", tmp_path / "bundle", *same)


@needs_rtx
def test_fp8_for_an_older_gpu_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = ("-o", tmp_path / "bundle", *RTX, "--gpu", "sm86", "--precision", "fp8")
    assert "need GPUs of sm89 and up" in _run("build", tiny_checkpoint, *options, status=1)
    assert list(tmp_path.iterdir()) == []


def test_a_precision_that_a_bundle_does_not_have_is_refused(tiny_bundle: Path) -> None:
    options = (*RTX, "--gpu", "sm89", "--precision", "int8")
    shown = _run("build", tiny_bundle, *options, status=1)
    assert f"those of {tiny_bundle} are stored already (fp32)" in shown


def test_options_of_an_export_are_refused_for_a_bundle(tiny_bundle: Path) -> None:
    options = (*RTX, "--gpu", "sm89", "--weights", "int8")
    assert "--weights is for exporting a model" in _run("build", tiny_bundle, *options, status=1)


def test_a_model_needs_an_output(tiny_checkpoint: Path) -> None:
    assert "Missing option '-o'" in _run("build", tiny_checkpoint, *RTX, "--gpu", "sm89", status=2)


@needs_rtx
def test_an_unknown_gpu_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = ("-o", tmp_path / "bundle", *RTX, "--gpu", "sm90")
    assert "--gpu is 'sm90'" in _run("build", tiny_checkpoint, *options, status=1)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    options = ("-o", tmp_path / "bundle", "--engine", "tensorrt")
    shown = _run("build", tiny_checkpoint, *options, status=1)
    assert "needs the package tensorrt, which cannot be imported" in shown
    assert list(tmp_path.iterdir()) == []


@needs_rtx
@pytest.mark.skipif(why_no_gpu() is None, reason="a GPU is here, so the other half is proved, too")
def test_validate_without_a_gpu_says_which_half_of_an_engine_was_proved(bundle: Path) -> None:
    few = ("--num-prompts", "1", "-n", "4", "--num-samples", "100")
    shown = _run("validate", bundle, *RTX, "--gpu", "sm120", *few)
    assert "built fp16 plans of these very graphs for sm89, sm120" in shown
    assert "NOT compared: no GPU here runs them" in shown
    assert "the numbers of tensorrt-rtx were not compared" in shown
    report = json.loads((bundle / "validation.json").read_text())
    assert report["passed"]
    assert report["engine"]["compared_on"] is None
    assert report["engine"]["outputs"] == []


def test_validate_refuses_an_engine_that_is_not_here_before_the_long_part(
    tiny_bundle: Path,
) -> None:
    shown = _run("validate", tiny_bundle, "--gpu", "sm89", status=1)
    assert "--gpu and --precision are for plans of TensorRT: give --engine" in shown
