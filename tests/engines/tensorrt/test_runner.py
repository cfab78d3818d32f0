"""Steps of plans on a fake GPU: the numbers of ONNX Runtime, within the contract."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile, StepInput
from specexport.engines.tensorrt.backend import TensorRTBackend
from specexport.engines.tensorrt.runner import TensorRTRunner
from specexport.errors import EngineError
from specexport.export.engine_spec import Backend
from specexport.export.manifest import Manifest
from specexport.runtime.batch import Batch, Row
from tests.fake_gpu import FakeMachine
from tests.linked import linked

PROFILE = Profile(max_slots=3, max_length=100, max_query=32, max_nodes=4)


@pytest.fixture(params=get_args(Backend))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine.install(monkeypatch, request.param)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return linked(tiny_bundle, tmp_path / "bundle")


@pytest.fixture
def manifest(machine: FakeMachine, bundle: Path) -> Manifest:
    return machine.add_plans(bundle)


@pytest.fixture
def runner(machine: FakeMachine, manifest: Manifest, bundle: Path) -> Iterator[TensorRTRunner]:
    with TensorRTBackend(bundle, manifest, machine.backend).runner("target", PROFILE) as runner:
        yield runner
    machine.assert_all_freed()


@pytest.fixture
def reference(manifest: Manifest, bundle: Path) -> Iterator[OrtRunner]:
    with OrtRunner(bundle / manifest.target.path, manifest.target, PROFILE) as runner:
        yield runner


def _step(*rows: Row, first_slot: int = 0) -> StepInput:
    return Batch.build(rows, PROFILE.max_length, first_slot=first_slot).step


def _logits(runner: Any, *rows: Row, first_slot: int = 0) -> Any:
    return runner.run(_step(*rows, first_slot=first_slot)).logits.copy()


STEPS = (
    _step(Row(0, [1, 2, 3], 1), Row(0, [4], 1), Row(0, list(range(30)), 2)),
    _step(Row(3, [5], 1), Row(1, [6, 7], 2)),
    _step(Row(30, [9, 8, 7], 3), first_slot=2),
    _step(Row(3, [5, 6], 1), Row(33, [1], 1), first_slot=1),
    _step(Row(4, [7], 1)),
)


def test_steps_give_the_numbers_of_onnx_runtime(
    runner: TensorRTRunner, reference: OrtRunner
) -> None:
    for step in STEPS:
        expected = reference.run(step).logits
        np.testing.assert_allclose(runner.run(step).logits, expected, atol=1e-5)
    for slot in range(3):
        found, expected = runner.read_cache(slot, 0, 40), reference.read_cache(slot, 0, 40)
        np.testing.assert_allclose(found, expected, atol=1e-5)
