"""The ONNX Runtime engine on the tiny model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from specexport.engines.ort import OrtRunner
from specexport.engines.ort_session import Placement, place
from specexport.engines.step import Profile
from specexport.errors import ConfigError, EngineError
from specexport.export.build import build
from specexport.export.manifest import GraphSpec, read_manifest
from specexport.runtime.batch import Batch, Row
from tests.fake_gpu_cache import FakeGpuCache, install_fake_cuda
from tests.gpu import skip_unless_available
from tests.tiny import write_checkpoint

PROFILE = Profile(max_slots=3, max_length=100, max_query=32)


@pytest.fixture
def graph(tiny_bundle: Path) -> tuple[Path, GraphSpec]:
    spec = read_manifest(tiny_bundle).target
    return tiny_bundle / spec.path, spec


PLACES = [
    "main memory",
    "device",
    pytest.param("onnxruntime-cuda", marks=pytest.mark.gpu),
    pytest.param("onnxruntime-tensorrt", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLACES)
def runner(
    graph: tuple[Path, GraphSpec],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[OrtRunner]:
    """With its cache in main memory, behind addresses as on a GPU, and on a real one."""
    if request.param == "main memory":
        placement = Placement()
    elif request.param == "device":
        install_fake_cuda(monkeypatch)
        placement = Placement(make_cache=FakeGpuCache)
    else:
        skip_unless_available(request.param)
        placement = place(request.param)
    with OrtRunner(*graph, PROFILE, placement) as runner:
        yield runner


def step(runner: OrtRunner, *rows: Row) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return runner.run(Batch.build(rows, PROFILE.max_length).step).logits.copy()


def test_the_cache_is_written_in_place_without_a_copy(
    runner: OrtRunner, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime warns on standard error whenever it has to copy a cache."""
    step(runner, Row(0, [1, 2, 3], 1), Row(0, [4], 1))
    step(runner, Row(3, [5], 1), Row(1, [6, 7], 1))
    assert "copying past_cache" not in capfd.readouterr().err
    entries = [runner.read_cache(slot, 0, 6) for slot in range(3)]
    written = np.abs(entries).sum(axis=(1, 2, 3, 5)) > 0  # [slots, S]
    assert written.tolist() == [
        [True, True, True, True, True, False],  # the fifth is padding of the second row's query
        [True, True, True, False, False, False],
        [False] * 6,
    ]


def test_a_cache_of_latents_is_written_in_place_and_moved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "deepseek_v3")
    spec = build(str(checkpoint), tmp_path / "bundle").target
    with OrtRunner(tmp_path / "bundle" / spec.path, spec, PROFILE) as runner:
        assert runner._cache.shape == (3, 1, 3, 1, 132, 32)
        expected = step(runner, Row(0, [5, 6, 7, 8], 4))
        step(runner, Row(0, [1], 1), Row(0, [2], 1), Row(0, [5, 6, 7], 1))
        runner.move_slot(2, 0, 3)
        np.testing.assert_allclose(step(runner, Row(3, [8], 1))[0], expected[3], atol=1e-5)
    assert "copying past_cache" not in capfd.readouterr().err


def test_an_unbound_cache_would_be_noticed(
    graph: tuple[Path, GraphSpec], capfd: pytest.CaptureFixture[str]
) -> None:
    """The test above cannot pass by the warning having gone away."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(graph[0]), providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.array([[1]]),
        "position_ids": np.array([[0]]),
        "write_indices": np.array([0]),
        "attention_mask": np.ones((1, 1, 1, 1), dtype=bool),
        "logits_indices": np.array([0]),
    }
    for tensor in graph[1].inputs[5:]:
        feeds[tensor.name] = np.zeros((1, 2, 8, 16), dtype=np.float32)
    session.run(None, feeds)
    assert "copying past_cache" in capfd.readouterr().err


def test_a_rejected_tail_is_overwritten(runner: OrtRunner) -> None:
    expected = step(runner, Row(0, [1, 2, 3, 4], 4))
    step(runner, Row(2, [9, 9, 9, 9], 4))
    np.testing.assert_allclose(step(runner, Row(2, [3, 4], 2)), expected[2:], atol=1e-5)


def test_a_moved_slot_goes_on_where_it_was(runner: OrtRunner) -> None:
    expected = step(runner, Row(0, [5, 6, 7, 8], 4))
    step(runner, Row(0, [1], 1), Row(0, [2], 1), Row(0, [5, 6, 7], 1))
    runner.move_slot(2, 0, 3)
    np.testing.assert_allclose(step(runner, Row(3, [8], 1))[0], expected[3], atol=1e-5)


def test_a_path_of_a_tree_is_accepted_where_it_lies(runner: OrtRunner) -> None:
    expected = step(runner, Row(0, [5, 6, 7, 8], 4))
    entries = runner.read_cache(0, 0, 3)
    step(runner, Row(1, [9, 9, 9, 9, 9], 1))
    runner.write_cache(0, 1, entries[:, :, :, 1:2])
    runner.write_cache(0, 4, entries[:, :, :, 2:3])
    runner.compact(0, 1, [0, 3])
    np.testing.assert_allclose(step(runner, Row(3, [8], 1))[0], expected[3], atol=1e-5)


def test_rows_that_begin_at_another_slot_leave_the_first_alone(runner: OrtRunner) -> None:
    expected = step(runner, Row(0, [5, 6, 7, 8], 4))
    runner.run(Batch.build([Row(0, [9, 9, 9], 1)], PROFILE.max_length, first_slot=1).step)
    np.testing.assert_allclose(step(runner, Row(3, [8], 1))[0], expected[3], atol=1e-5)
    assert np.abs(runner.read_cache(1, 0, 3)).max(axis=(0, 1, 2, 4)).all()


def test_rows_do_not_see_each_other(runner: OrtRunner) -> None:
    alone = step(runner, Row(0, [7, 8, 9], 3))
    batched = step(runner, Row(0, [1, 1, 1, 1, 1], 0), Row(0, [7, 8, 9], 3), Row(0, [2], 0))
    np.testing.assert_allclose(batched, alone, atol=1e-5)


def test_a_row_may_fill_the_cache_while_another_is_far_longer(runner: OrtRunner) -> None:
    step(runner, Row(99, [1], 1), Row(0, [2] * 32, 1))


def test_however_many_ranges_of_slots_there_were_few_bindings_are_held(
    graph: tuple[Path, GraphSpec],
) -> None:
    profile = Profile(max_slots=12, max_length=20, max_query=4)
    ranges = [(first, size) for first in range(12) for size in range(1, 13 - first)]
    with OrtRunner(*graph, profile) as runner:
        for first, size in [*ranges, ranges[0]]:
            rows = [Row(0, [1], 1)] * size
            step = Batch.build(rows, profile.max_length, first_slot=first).step
            logits = runner.run(step).logits
            np.testing.assert_allclose(logits, np.repeat(logits[:1], size, axis=0), atol=1e-5)
            assert np.isfinite(logits).all()
        assert len(ranges) > len(runner._bindings) > 0


def test_the_time_inside_the_library_is_counted(runner: OrtRunner) -> None:
    step(runner, Row(0, [1], 1))
    assert runner.run_time_s > 0


def test_a_cache_longer_than_the_graphs_positions_is_refused(graph: tuple[Path, GraphSpec]) -> None:
    with pytest.raises(ConfigError, match="cache of 1000 tokens was asked for"):
        OrtRunner(*graph, Profile(max_length=1000))


def test_a_cache_that_does_not_fit_memory_is_refused(graph: tuple[Path, GraphSpec]) -> None:
    with pytest.raises(ConfigError, match=r"needs [\d.]+ GB\. Lower --max-slots"):
        OrtRunner(*graph, Profile(max_slots=10**12, max_length=100))


def test_a_graph_that_cannot_be_loaded_is_an_engine_error(
    graph: tuple[Path, GraphSpec], tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(EngineError, match="cannot load"):
        OrtRunner(tmp_path / "model.onnx", graph[1], PROFILE)


def test_a_failing_step_is_an_engine_error(runner: OrtRunner) -> None:
    with pytest.raises(EngineError, match="failed in a step"):
        step(runner, Row(0, [10**6], 1))


def test_the_caller_may_ask_for_no_more_than_the_graph_has(tiny_bundle: Path) -> None:
    model = onnx.load(tiny_bundle / "target/model.onnx", load_external_data=False)
    spec = read_manifest(tiny_bundle).target
    assert [i.name for i in model.graph.input] == [i.name for i in spec.inputs]
    assert [o.name for o in model.graph.output] == [o.name for o in spec.outputs]
