"""The decide graph of a bundle, run by ONNX Runtime after the target's."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport import Engine, EngineOptions, SamplingParams
from specexport.engines.ort import OrtBackend
from specexport.engines.ort_decide import OrtDecider
from specexport.engines.step import DecideOutput, Profile
from specexport.errors import ConfigError
from specexport.export.manifest import read_manifest
from specexport.runtime.batch import Batch, Row
from specexport.runtime.packing import pack
from specexport.runtime.request import Request
from specexport.runtime.turn import Turn

PROMPTS = ["the cat sat on the", "one two one two one", "x"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "repetition_penalty": 1.2},
]


def outputs(bundle: Path, **options: Any) -> list[list[int]]:
    with Engine(bundle, EngineOptions(max_length=96, num_threads=1, **options)) as engine:
        streams = [
            engine.submit(prompt, SamplingParams(max_tokens=24, **params))
            for prompt, params in zip(PROMPTS, OPTIONS, strict=True)
        ]
        return [list(stream.result().token_ids) for stream in streams]


@pytest.mark.parametrize("drafts", [{"num_speculative_tokens": 3}, {"adaptive": False}])
def test_an_engine_gives_the_same_with_the_graph_and_without(
    draft_bundle: Path, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    run = OrtDecider.run

    def counted(self: OrtDecider, *arguments: Any) -> DecideOutput:
        calls.append(run(self, *arguments))
        return calls[-1]

    monkeypatch.setattr(OrtDecider, "run", counted)
    expected = outputs(draft_bundle, **drafts)
    assert calls == []  # on a CPU the host decides unless it is told not to
    assert outputs(draft_bundle, decide_in_graph=True, **drafts) == expected
    assert all(output.is_decided.all() for output in calls)
    assert sum(int(output.num_accepted.sum()) for output in calls) > 0


def test_a_bundle_has_the_graph_and_one_without_it_still_runs(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(tiny_bundle)
    assert manifest.decide is not None
    assert manifest.decide.path in manifest.files
    assert manifest.decide.vocab_size == manifest.target.vocab_size
    old = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, old)
    (old / manifest.decide.path).unlink()
    files = {n: entry for n, entry in manifest.files.items() if n != manifest.decide.path}
    manifest.model_copy(update={"decide": None, "files": files}).write(old)
    assert outputs(old) == outputs(tiny_bundle)
    with pytest.raises(ConfigError, match=r"has no decide graph\. Build the bundle again"):
        outputs(old, decide_in_graph=True)


def test_a_step_that_was_decided_gives_its_logits_when_asked(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    profile = Profile(max_length=32, max_query=8, num_threads=1, decides=True)
    with OrtBackend(tiny_bundle, manifest, 1).runner("target", profile) as runner:
        step = Batch.build([Row(0, [1, 2, 3], 1)], 32).step
        logits = runner.run(step).logits.copy()
        request = Request(0, SamplingParams(), 9, 3, [1, 2, 3], slot=0)
        request.admit(())
        decide = pack([Turn(request, 3)], manifest.target)
        output = runner.run(replace(step, decide=decide))
        assert output.logits.shape == (0, manifest.target.vocab_size)
        np.testing.assert_array_equal(runner.read_logits(), logits)
        assert output.decided is not None
        assert output.decided.token_ids.tolist() == [[int(logits[0].argmax())]]
