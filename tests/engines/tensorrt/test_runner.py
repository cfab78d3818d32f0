"""Steps of plans on a fake GPU: the numbers of ONNX Runtime, within the contract."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile, StepInput
from specexport.engines.tensorrt.backend import TensorRTBackend
from specexport.engines.tensorrt.loaded import NUM_CONTEXTS
from specexport.engines.tensorrt.runner import TensorRTRunner
from specexport.errors import EngineError
from specexport.export.engine_spec import Backend
from specexport.export.manifest import Manifest
from specexport.runtime.batch import Batch, Row
from tests.fake_cuda import cudaError_t
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


def test_a_step_allocates_nothing_and_waits_once(
    machine: FakeMachine, runner: TensorRTRunner
) -> None:
    for step in (*STEPS, *STEPS):
        machine.cuda.calls.clear()
        runner.run(step)
        calls = machine.cuda.calls
        assert calls.count("cudaStreamSynchronize") == 1
        assert not {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"} & set(calls)
        assert calls.count("cudaMemcpyAsync") == 5 + 1  # inputs and logits


def test_contexts_are_made_on_loading(machine: FakeMachine, runner: TensorRTRunner) -> None:
    engine = machine.library.engines[0]  # the target's
    made = len(engine.contexts)
    for step in STEPS:
        runner.run(step)
    assert len(engine.contexts) == made
    assert {context.profile for context in engine.contexts} == {0, 1}


def test_the_narrow_profile_is_taken_where_it_fits(
    machine: FakeMachine, runner: TensorRTRunner
) -> None:
    engine = machine.library.engines[0]  # the target's
    runner.run(STEPS[0])  # 30 query tokens
    assert sum(c.num_runs for c in engine.contexts if c.profile == 1) == 1
    runner.run(STEPS[1])  # 2
    assert sum(c.num_runs for c in engine.contexts if c.profile == 0) == 1


def test_neighbouring_lengths_are_one_kind_of_step(
    machine: FakeMachine, runner: TensorRTRunner
) -> None:
    for start in range(40):
        runner.run(_step(Row(start, [1], 1)))
    used = [c for c in machine.library.engines[0].contexts if c.num_runs or c.shapes]
    assert len(used) == 1


@pytest.mark.parametrize("machine", ["tensorrt"], indirect=True)
def test_a_kind_of_step_is_captured_when_it_comes_again_and_then_replayed(
    machine: FakeMachine, runner: TensorRTRunner, reference: OrtRunner
) -> None:
    for start in range(10):
        machine.cuda.calls.clear()
        rows = Row(start, [start + 1], 1), Row(start, [start + 2], 1)
        expected = _logits(reference, *rows, first_slot=1)
        np.testing.assert_allclose(_logits(runner, *rows, first_slot=1), expected, atol=1e-5)
        assert machine.cuda.calls.count("cudaStreamBeginCapture") == (start == 1)
        assert machine.cuda.calls.count("cudaGraphLaunch") == (start >= 1)
    assert len(machine.cuda.graphs) == 1


@pytest.mark.parametrize("machine", ["tensorrt"], indirect=True)
def test_few_graphs_are_kept_and_none_is_used_for_another_kind(
    machine: FakeMachine, runner: TensorRTRunner, reference: OrtRunner
) -> None:
    kinds = [(first, size, width) for first in range(3) for size in range(1, 4 - first)
             for width in (1, 2, 3, 5)]  # fmt: skip
    for first, size, width in [*kinds, *kinds[::-1], *kinds, *kinds[-5:]]:
        rows = [Row(0, list(range(width)), 1)] * size
        expected = _logits(reference, *rows, first_slot=first)
        np.testing.assert_allclose(_logits(runner, *rows, first_slot=first), expected, atol=1e-5)
    assert 0 < len(machine.cuda.graphs) <= 2 * NUM_CONTEXTS < len(kinds)


@pytest.mark.parametrize("machine", ["tensorrt"], indirect=True)
def test_a_plan_that_cannot_be_captured_runs_without_graphs(
    machine: FakeMachine, runner: TensorRTRunner, reference: OrtRunner
) -> None:
    machine.library.refuses_capture = True
    for step in STEPS * 3:
        np.testing.assert_allclose(runner.run(step).logits, reference.run(step).logits, atol=1e-5)
    assert machine.cuda.calls.count("cudaStreamBeginCapture") == 1
    assert not machine.cuda.graphs


def test_tensorrt_rtx_captures_for_itself(machine: FakeMachine, runner: TensorRTRunner) -> None:
    for step in STEPS * 3:
        runner.run(step)
    assert ("cudaStreamBeginCapture" in machine.cuda.calls) == (machine.backend == "tensorrt")


def test_a_step_with_more_logits_than_drafts_have_makes_room_once(
    machine: FakeMachine, runner: TensorRTRunner, reference: OrtRunner
) -> None:
    rows = [Row(0, list(range(20)), 20)] * 3
    for step in STEPS * 2:  # kinds of steps that are bound
        runner.run(step)
        reference.run(step)
    for expected_calls in (True, False):
        machine.cuda.calls.clear()
        expected = _logits(reference, *rows)
        np.testing.assert_allclose(_logits(runner, *rows), expected, atol=1e-5)
        assert ("cudaMalloc" in machine.cuda.calls) == expected_calls
    for step in STEPS:
        np.testing.assert_allclose(runner.run(step).logits, reference.run(step).logits, atol=1e-5)


def test_slots_move_and_entries_close_up_as_on_the_cpu(
    runner: TensorRTRunner, reference: OrtRunner
) -> None:
    rng = np.random.default_rng(0)
    shape = reference.read_cache(0, 0, 100).shape
    for slot in range(3):
        entries = rng.normal(size=shape).astype(np.float32)
        for either in (runner, reference):
            either.write_cache(slot, 0, entries)
            np.testing.assert_array_equal(either.read_cache(slot, 0, 100), entries)
    moves = [(2, 0, 41), (0, 1, 100), (1, 1, 7), (2, 1, 0)]
    drafts = [(0, 3, [0, 2, 3, 7]), (1, 90, [1]), (2, 5, [0, 1, 2]), (2, 0, [*range(0, 90, 7)]),
              (1, 0, [*range(1, 95)])]  # fmt: skip
    for either in (runner, reference):
        for move in moves:
            either.move_slot(*move)
        for draft in drafts:
            either.compact(*draft)
        either.write_cache(1, 50, either.read_cache(0, 10, 30))
    for slot in range(3):
        found, expected = runner.read_cache(slot, 0, 100), reference.read_cache(slot, 0, 100)
        np.testing.assert_array_equal(found, expected)
    assert runner.read_cache(0, 5, 5).shape == reference.read_cache(0, 5, 5).shape


@pytest.mark.parametrize("machine", ["tensorrt-rtx"], indirect=True)
def test_half_precision_caches_are_read_and_written_as_fp32(
    machine: FakeMachine, bundle: Path, reference: OrtRunner
) -> None:
    manifest = machine.add_plans(bundle, "fp16")
    engine = TensorRTBackend(bundle, manifest, machine.backend)
    with engine.runner("target", PROFILE) as runner:
        for step in STEPS:
            expected = reference.run(step).logits
            np.testing.assert_allclose(runner.run(step).logits, expected, atol=0.1)  # 3 digits
        entries = runner.read_cache(2, 0, 30)
        assert entries.dtype == np.float32
        np.testing.assert_allclose(entries, reference.read_cache(2, 0, 30), atol=0.01)
        runner.write_cache(0, 7, entries)
        np.testing.assert_array_equal(runner.read_cache(0, 7, 37), entries)


def test_the_time_inside_the_library_is_counted(runner: TensorRTRunner) -> None:
    runner.run(STEPS[0])
    assert runner.run_time_s > 0


def test_an_output_stays_readable_after_the_engine_is_closed(runner: TensorRTRunner) -> None:
    logits = runner.run(STEPS[0]).logits
    copy = logits.copy()
    runner.close()
    np.testing.assert_array_equal(logits, copy)


def test_a_closed_engine_says_so(runner: TensorRTRunner) -> None:
    runner.close()
    for use in (
        lambda: runner.run(STEPS[0]),
        lambda: runner.move_slot(0, 1, 3),
        lambda: runner.compact(0, 1, [1]),
        lambda: runner.read_cache(0, 0, 1),
        lambda: runner.write_cache(0, 0, np.zeros((2, 2, 2, 1, 16), np.float32)),
    ):
        with pytest.raises(EngineError, match=r"target/model\.onnx is closed"):
            use()


def test_a_failing_step_gives_the_reason_of_the_library(
    machine: FakeMachine, runner: TensorRTRunner
) -> None:
    machine.library.refuses_to_run = True
    expected = r"failed in a step of .*target\.plan: the fake was told to refuse"
    with pytest.raises(EngineError, match=expected):
        runner.run(STEPS[0])
    machine.library.refuses_to_run = False
    runner.run(STEPS[0])


def test_a_failing_gpu_gives_the_name_of_the_error(
    machine: FakeMachine, runner: TensorRTRunner
) -> None:
    machine.cuda.fail["cudaStreamSynchronize"] = cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match=r"cudaErrorIllegalAddress.* start it again"):
        runner.run(STEPS[0])
    machine.cuda.fail.clear()
    machine.cuda.cudaStreamSynchronize(next(iter(machine.cuda.streams)))
