"""Whole requests on every engine of a GPU: speculation changes nothing there either."""

import shutil
from pathlib import Path

import pytest

from specexport.engines.available import ENGINES, EngineName
from specexport.export.engine_spec import Backend
from specexport.export.tensorrt.engines import add_engines
from specexport.export.tensorrt.wanted import WantedEngine
from specexport.gpu import find_gpu
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.params import SamplingParams
from tests.gpu import skip_unless_available

PROMPTS = ["one two three, one two three, one", "abcabcabcab", "Once upon a time"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=ENGINES[1:])
def engine_name(request: pytest.FixtureRequest) -> EngineName:
    skip_unless_available(request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def bundle(draft_bundle: Path, engine_name: EngineName, tmp_path: Path) -> Path:
    """With fp32 plans where the engine needs some, since fp16 parts more greedy outputs."""
    output = tmp_path / "bundle"
    shutil.copytree(draft_bundle, output)
    if engine_name in ("tensorrt", "tensorrt-rtx"):
        backend: Backend = engine_name
        wanted = WantedEngine(backend, (find_gpu().compute_capability,), "fp32")
        add_engines(output, [wanted], lambda what: None)
    return output


def _generate(bundle: Path, options: EngineOptions) -> tuple[list[tuple[int, ...]], int]:
    with Engine(bundle, options) as engine:
        streams = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        outputs = [stream.result().token_ids for stream in streams]
        return outputs, engine.stats().acceptance.num_drafts


@pytest.mark.gpu
def test_a_gpu_generates_what_the_cpu_generates_with_and_without_drafts(
    bundle: Path, engine_name: EngineName
) -> None:
    expected, _ = _generate(bundle, EngineOptions(method="none"))
    plain, _ = _generate(bundle, EngineOptions(engine=engine_name, method="none"))
    drafted, num_drafts = _generate(bundle, EngineOptions(engine=engine_name, adaptive=False))
    assert num_drafts > 0
    assert plain == expected
    assert drafted == expected


@pytest.mark.gpu
def test_requests_that_are_preempted_and_share_prompts_end_the_same_on_a_gpu(
    bundle: Path, engine_name: EngineName
) -> None:
    """One slot for three requests twice over: slots move, and prefixes are kept and put back."""
    expected, _ = _generate(bundle, EngineOptions(method="none"))
    options = EngineOptions(engine=engine_name, max_slots=1, adaptive=False)
    with Engine(bundle, options) as engine:
        for _ in range(2):
            streams = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
            assert [stream.result().token_ids for stream in streams] == expected
