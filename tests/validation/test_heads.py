"""`validate` on bundles with heads: every method passes, and a head that is not its checkpoint's
fails, though its output is right."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.errors import CheckpointError, ConfigError
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import hash_file, read_manifest
from specexport.export.methods import DynamicTreeSpec, HeadMethod, NgramMethod, TypicalAcceptance
from specexport.validation import head_check
from specexport.validation.report import ValidationReport, report_table
from specexport.validation.run import ValidationOptions, validate
from tests.head_bundles import MAKERS, HeadBundle

QUICK = ValidationOptions(num_prompts=2, max_tokens=8, num_samples=100)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HeadBundle]:
    return cache(lambda name: MAKERS[name](tmp_path_factory.mktemp("heads"), "hidden", 0.25))


@pytest.fixture
def copied(bundles: Callable[[str], HeadBundle], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(bundles(name).path, tmp_path / "copy"))


def shown(report: ValidationReport) -> str:
    table = report_table(report)
    cells = [str(cell) for column in table.columns for cell in column.cells]
    return " ".join([*cells, str(table.caption)])


@pytest.mark.parametrize("name", MAKERS)
def test_a_bundle_with_a_head_passes(name: str, bundles: Callable[[str], HeadBundle]) -> None:
    report = validate(bundles(name).path, QUICK)
    head = report.head
    assert report.passed, report
    assert head is not None
    assert report.head_not_compared is None
    assert head.max_abs_diff < 1e-4
    assert head.top1_agreement == 1.0
    assert head.layout.lower().replace("-", "").startswith(name.split(",", maxsplit=1)[0])
    assert (head.num_draft_steps > 0) == (not name.startswith("medusa"))
    assert len(report.greedy.acceptance_per_position) > 1
    assert report.distribution_test.num_drafts > 0
    assert head.layout in shown(report)


def spoil(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change a file of numbers; the manifest then agrees with it."""
    bundle = path.parents[1]
    if path.suffix == ".npy":
        np.save(path, edit(np.load(path)))
    else:
        edit(np.fromfile(path, dtype=np.float32)).tofile(path)
    manifest = read_manifest(bundle)
    files = {**manifest.files, str(path.relative_to(bundle)): hash_file(path)}
    manifest.model_copy(update={"files": files}).write(bundle)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("medusa", "medusa.weights"),
        ("eagle", "head.weights"),
        ("eagle3, SpecForge", "fuse.weights"),
        ("eagle3, SpecForge", "token_map.npy"),
        ("mtp, mimo", "head.weights"),
    ],
)
def test_a_head_that_is_not_its_checkpoints_fails_though_outputs_are_right(
    name: str, file: str, copied: Callable[[str], Path]
) -> None:
    bundle = copied(name)
    spoil(bundle / "target" / file, lambda numbers: numbers[::-1])
    report = validate(bundle, QUICK)
    assert report.greedy.identical
    assert report.distribution_test.passed
    assert report.head is not None
    assert not report.head.passed
    assert not report.passed
    assert "FAILED" in shown(report)


def test_a_lossy_bundle_is_validated_lossless_and_says_so(
    bundles: Callable[[str], HeadBundle], tmp_path: Path
) -> None:
    options = BuildOptions(
        HeadMethod(kind="mtp", tree=DynamicTreeSpec(depth=3, top_k=2, num_nodes=4)),
        acceptance=TypicalAcceptance(epsilon=0.01, delta=0.01),
        lookup=NgramMethod(),
        weight_type="bf16",
    )
    build(str(bundles("mtp, qwen3").checkpoint), tmp_path / "bundle", options)
    report = validate(tmp_path / "bundle", QUICK)
    assert report.passed, report
    assert (report.acceptance, report.rounded_to) == ("typical", "bf16")
    assert "typical, is LOSSY" in shown(report)


def test_a_head_that_cannot_be_compared_is_reported_as_such(
    bundles: Callable[[str], HeadBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CheckpointError("transformers has no such layer.")

    monkeypatch.setattr(head_check, "TorchMtp", refuse)
    report = validate(bundles("mtp, qwen3").path, QUICK)
    assert report.passed
    assert report.head is None
    assert report.head_not_compared == "transformers has no such layer."
    assert "NOT compared" in shown(report)
    assert "the head's graph was not compared with PyTorch" in shown(report)


def test_a_head_that_was_moved_is_asked_for(
    bundles: Callable[[str], HeadBundle], copied: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = copied("eagle")
    manifest = read_manifest(bundle)
    moved = manifest.provenance.model_copy(update={"head_checkpoint": str(tmp_path / "gone")})
    manifest.model_copy(update={"provenance": moved}).write(bundle)
    with pytest.raises(ConfigError, match=r"gone, which is not there any more.*--head-checkpoint"):
        validate(bundle, QUICK)
    where = str(bundles("eagle").path.parent / "head")
    assert validate(bundle, replace(QUICK, head_checkpoint=where)).passed
