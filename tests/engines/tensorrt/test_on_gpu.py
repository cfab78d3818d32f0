"""Plans on the GPU of this machine, against ONNX Runtime on its CPU."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile, StepInput
from specexport.engines.tensorrt.backend import TensorRTBackend
from specexport.errors import ConfigError
from specexport.export.build import BuildOptions, build
from specexport.export.engine_spec import Backend, FloatType
from specexport.export.manifest import read_manifest
from specexport.export.methods import StaticTreeSpec
from specexport.export.tensorrt.engines import add_engines
from specexport.export.tensorrt.library import find_library
from specexport.export.tensorrt.wanted import WantedEngine
from specexport.gpu import find_gpu
from specexport.runtime.batch import Batch, Row
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.output import Completion
from specexport.runtime.params import SamplingParams
from tests.cycle import ORDER, follow
from tests.head_bundles import MAKERS
from tests.linked import linked
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.gpu

PROFILE = Profile(max_slots=3, max_length=100, max_query=32, max_nodes=4)
# Products round to 10 bits in fp16, and in fp32 where the library takes TF32; to 7 in bf16.
TOLERANCES: dict[FloatType, float] = {"fp32": 0.01, "fp16": 0.01, "bf16": 0.06}
HEADS = ("medusa", "eagle", "eagle3, SpecForge", "mtp, deepseek_v3")
TREE = StaticTreeSpec(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


@pytest.fixture(params=get_args(Backend))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each library that is installed and builds for the GPU here."""
    gpu = find_gpu()
    try:
        find_library(request.param).check_gpus([gpu.compute_capability])
    except ConfigError as error:
        pytest.skip(str(error))
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: MAKERS[name](tmp_path_factory.mktemp("heads"), "hidden", 0.0).path)


def _add_plans(bundle: Path, backend: Backend, precision: FloatType, chunk: int = 32) -> None:
    gpu = find_gpu().compute_capability
    wanted = WantedEngine(backend, (gpu,), precision, max_slots=3, chunk=chunk)
    add_engines(bundle, [wanted], lambda what: None)


def _steps() -> Iterator[StepInput]:
    """Kinds of steps in turns, each often enough to be captured and replayed, among others."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(1, 200, count).tolist()  # type: ignore[no-any-return]

    yield Batch.build([Row(0, tokens(n), 1) for n in (20, 3, 32)], 100).step
    for i in range(6):
        rows = [Row(20 + i, tokens(1), 1), Row(3 + i, tokens(1), 1), Row(32 + i, tokens(1), 1)]
        yield Batch.build(rows, 100).step
        yield Batch.build([Row(9 + i, tokens(4), 4), Row(38, tokens(2), 2)], 100, first_slot=1).step


def _assert_near(found: Any, expected: Any, tolerance: float) -> None:
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("precision", get_args(FloatType))
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_steps_and_caches_are_those_of_onnx_runtime(
    backend: Backend, family: str, precision: FloatType, tmp_path: Path
) -> None:
    source, bundle = write_checkpoint(tmp_path / "checkpoint", family), tmp_path / "bundle"
    spec = build(str(source), bundle, BuildOptions()).target
    _add_plans(bundle, backend, precision)
    tolerance = TOLERANCES[precision]
    with (
        OrtRunner(bundle / spec.path, spec, PROFILE) as reference,
        TensorRTBackend(bundle, read_manifest(bundle), backend).runner("target", PROFILE) as runner,
    ):
        for step in _steps():
            expected = reference.run(step).logits
            _assert_near(runner.run(step).logits, expected, tolerance)
        for slot in range(3):
            found, expected = runner.read_cache(slot, 0, 20), reference.read_cache(slot, 0, 20)
            _assert_near(found, expected, tolerance)


@pytest.mark.parametrize("precision", get_args(FloatType))
def test_entries_move_and_close_up_without_a_change(
    backend: Backend, tiny_bundle: Path, tmp_path: Path, precision: FloatType
) -> None:
    bundle = linked(tiny_bundle, tmp_path / "bundle")
    _add_plans(bundle, backend, precision)
    opened = TensorRTBackend(bundle, read_manifest(bundle), backend)
    with opened.runner("target", PROFILE) as runner:
        shape = runner.read_cache(0, 0, 100).shape
        runner.write_cache(0, 0, np.random.default_rng(0).normal(size=shape).astype(np.float32))
        entries = runner.read_cache(0, 0, 100)  # rounded
        runner.move_slot(0, 2, 100)
        np.testing.assert_array_equal(runner.read_cache(2, 0, 100), entries)
        assert not runner.read_cache(1, 0, 100).any()
        kept = [0, 2, 3, 7, *range(9, 90)]
        runner.compact(2, 5, kept)
        moved = entries[:, :, :, [5 + entry for entry in kept]]
        np.testing.assert_array_equal(runner.read_cache(2, 5, 5 + len(kept)), moved)
        np.testing.assert_array_equal(runner.read_cache(2, 0, 5), entries[:, :, :, :5])


@pytest.mark.parametrize("name", HEADS)
def test_heads_draft_and_their_target_says_what_it_was_taught(
    backend: Backend, heads: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    bundle = linked(heads(name), tmp_path / "bundle")
    _add_plans(bundle, backend, "fp32")
    options = EngineOptions(engine=backend, max_slots=2, step_tokens=8, tree=TREE)
    prompts, lengths = (ORDER[3:4], ORDER[8:10], ORDER[9:34]), (9, 12, 15)
    with Engine(bundle, options) as engine:
        streams = [
            engine.submit(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        found = [list(stream.result().token_ids) for stream in streams]
        acceptance = engine.stats().acceptance
    assert found == [follow(p[-1], n) for p, n in zip(prompts, lengths, strict=True)]
    assert acceptance.accepted == acceptance.proposed


@pytest.mark.model
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_smollm2_says_what_it_says_on_the_cpu(
    backend: Backend, smollm2_bundle: Path, tmp_path: Path, precision: FloatType, method: Any
) -> None:
    bundle = linked(smollm2_bundle, tmp_path / "bundle")
    _add_plans(bundle, backend, precision, chunk=256)
    found, expected = (
        _greedy(bundle, EngineOptions(engine=engine, method=method, max_slots=1))
        for engine in (backend, "onnxruntime")
    )
    _assert_same_but_for_ties(found, expected)


def _greedy(bundle: Path, options: EngineOptions) -> Completion:
    params = SamplingParams(max_tokens=48, logprobs=True, top_logprobs=2)
    with Engine(bundle, options) as engine:
        prompt = [{"role": "user", "content": "Count from one to ten, twice."}]
        return engine.submit_chat(prompt, params).result()


def _assert_same_but_for_ties(found: Completion, expected: Completion) -> None:
    """Up to where the CPU's two likeliest tokens are as near as rounding may bring them."""
    pairs = zip(found.token_ids, expected.token_ids, strict=False)
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None:
        assert len(found.token_ids) == len(expected.token_ids)
        return
    assert expected.logprobs is not None
    best, second = (token.logprob for token in expected.logprobs[first].top)
    assert best - second < 0.2
