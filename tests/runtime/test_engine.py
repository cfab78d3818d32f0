"""The embedding API on the tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specexport
from specexport import Engine, EngineOptions, FinishReason, SamplingParams
from specexport.errors import BundleError, ConfigError, EngineError, RequestError
from specexport.export.methods import DynamicTreeSpec
from tests.tiny import EOS_ID, make_model
from tests.turnstile import held, loop_of

PROMPT = "to be or not to be, to be or"


def reference_greedy(prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=EOS_ID, pad_token_id=0
    )
    inputs = torch.tensor([prompt])
    output = make_model("llama").generate(
        inputs, attention_mask=torch.ones_like(inputs), generation_config=config
    )
    return [int(i) for i in output[0, len(prompt) :]]


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft"])
def test_greedy_equals_transformers(draft_bundle: Path, method: Any, k: int) -> None:
    options = EngineOptions(method=method, num_speculative_tokens=k, max_slots=3, step_tokens=16)
    with Engine(draft_bundle, options) as engine:
        prompts = [engine.tokenizer.encode(PROMPT[i:] * (i + 1)) for i in range(5)]
        streams = [engine.submit(p, SamplingParams(max_tokens=30)) for p in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert list(stream.result().token_ids) == reference_greedy(prompt, 30)
        assert (engine.stats().acceptance.num_drafts > 0) == (k > 0)


def test_a_stream_gives_the_same_as_its_result(tiny_bundle: Path) -> None:
    with Engine(tiny_bundle) as engine:
        whole = engine.submit(PROMPT, SamplingParams(max_tokens=40)).result()
        chunks = list(engine.submit(PROMPT, SamplingParams(max_tokens=40)))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is whole.finish_reason is FinishReason.LENGTH


def test_several_streams_may_be_read_in_any_order(tiny_bundle: Path) -> None:
    with Engine(tiny_bundle, EngineOptions(max_slots=2)) as engine:
        streams = [engine.submit(PROMPT, SamplingParams(max_tokens=n)) for n in (5, 9, 7)]
        lengths = [len(s.result().token_ids) for s in reversed(streams)]
    assert lengths == [7, 9, 5]


def test_statistics_count_what_happened(tiny_bundle: Path) -> None:
    with Engine(tiny_bundle) as engine:
        result = engine.submit(PROMPT, SamplingParams(max_tokens=20)).result()
        stats = engine.stats()
    assert stats.num_finished == 1
    assert stats.num_output_tokens == len(result.token_ids) == 20
    assert stats.num_steps == result.stats.num_decode_steps + 1
    assert 0 < stats.target_time_s <= stats.engine_time_s < stats.total_time_s
    assert result.stats.prefill_time_s > 0
    assert result.stats.tokens_per_s(20) > 0


def test_a_cancelled_stream_keeps_what_it_has(tiny_bundle: Path) -> None:
    with Engine(tiny_bundle) as engine, held(loop_of(engine)) as turnstile:
        stream = engine.submit(PROMPT, SamplingParams(max_tokens=50))
        turnstile.let()
        chunk = next(iter(stream))
        stream.cancel()
        turnstile.let()
        result = stream.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.token_ids[: len(chunk.token_ids)] == chunk.token_ids
    assert 0 < len(result.token_ids) < 50


def test_without_max_tokens_the_output_ends_with_the_cache(tiny_bundle: Path) -> None:
    params = SamplingParams(ignore_eos=True)
    with Engine(tiny_bundle, EngineOptions(max_length=60)) as engine:
        result = engine.submit([1] * 50, params).result()
    assert len(result.token_ids) == 10
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([3] * 60, {}, "has 60 tokens; the cache holds 60"),
        ([3] * 70, {}, "has 70 tokens; the cache holds 60"),
        ([3] * 50, {"max_tokens": 11}, "at most 10 tokens"),
        ([3, 999], {}, "Token id 999 .* vocabulary of 272"),
        ([-1], {}, "Token id -1"),
        ([1.5], {}, "must be text or a list of token ids"),
        (None, {}, "must be text or a list of token ids"),
        (["a"], {}, "must be text or a list of token ids"),
        ([[1, 2]], {}, "must be text or a list of token ids"),
        ("\ud800", {}, "no valid Unicode"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(
    tiny_bundle: Path, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with Engine(tiny_bundle, EngineOptions(max_length=60)) as engine:
        with pytest.raises(RequestError, match=message):
            engine.submit(prompt, SamplingParams(**params))
        assert engine.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_slots": 0}, "max_slots is 0; it must be a whole number from 1"),
        ({"max_length": 9999}, "built for 256"),
        ({"method": "draft"}, "has no draft model"),
        ({"engine": "abacus"}, "engine is 'abacus'; it must be one of onnxruntime,"),
        ({"method": "oracle"}, "method is 'oracle'; it must be one of none, ngram, suffix, draft"),
        ({"method": "medusa"}, "has no medusa head. Build it with --method medusa --head PATH"),
        (
            {"method": "none", "lookup": "suffix"},
            "lookup was given, but nothing is to be drafted",
        ),
        (
            {"num_speculative_tokens": 0, "tree": DynamicTreeSpec()},
            "tree was given, but nothing is to be drafted",
        ),
        ({"method": "ngram", "lookup": "suffix"}, "A lookup goes before a draft model or a head"),
        ({"method": "suffix", "tree": DynamicTreeSpec()}, "Method suffix drafts no trees"),
        (
            {"num_speculative_tokens": 256, "max_length": 200},
            r"Drafts have up to 256 tokens, but target/model\.onnx was built for 256 positions",
        ),
        ({"lookup": "draft"}, "lookup is 'draft'; it must be one of none, ngram, suffix"),
        ({"num_speculative_tokens": 10**6}, "from 0 to 256"),
        ({"num_threads": 10**12}, "num_threads is 1000000000000"),
        ({"max_slots": 1.5}, "max_slots is 1.5"),
        ({"step_tokens": None}, "step_tokens is None"),
        ({"adaptive": "no"}, "adaptive is 'no'; it must be True, False or None"),
        ({"method": "none", "num_speculative_tokens": 3}, "Leave one of them out"),
    ],
)
def test_a_bad_engine_option_is_refused(
    tiny_bundle: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_bundle, EngineOptions(**options))


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


@pytest.mark.parametrize(
    "name", ["target/model.onnx", "target/model.weights", "tokenizer/tokenizer.json"]
)
def test_a_changed_byte_or_a_missing_file_is_found(copied: Path, name: str) -> None:
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"{name} was changed after the build"):
        Engine(copied)
    (copied / name).write_bytes(data[:-1])
    with pytest.raises(BundleError, match=f"{name} has {len(data) - 1} bytes"):
        Engine(copied)
    (copied / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        Engine(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {}}, r"target/model\.onnx is not among its files"),
        ({"target": {"path": "../other/model.onnx"}}, "is not among its files"),
        ({"files": {"../x": {"size_bytes": 1, "sha256": ""}}}, "no path inside the bundle"),
        ({"files": {"/etc/passwd": {"size_bytes": 1, "sha256": ""}}}, "no path inside the bundle"),
        ({"target": {"sliding_window": 0}}, r"damaged at 'target\.sliding_window'"),
        ({"target": {"num_layers": -1}}, r"damaged at 'target\.num_layers'"),
        ({"target": {"vocab_size": 10**12}}, r"damaged at 'target\.vocab_size'"),
        ({"method": {"kind": "medusa"}}, "method medusa lacks its graph"),
    ],
)
def test_a_manifest_cannot_point_outside_or_ask_for_nonsense(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    for key, value in changes.items():
        manifest[key] = {**manifest[key], **value} if value and key != "method" else value
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=message):
        Engine(copied)


def test_a_closed_engine_has_cancelled_everything_and_says_that_it_is_closed(
    tiny_bundle: Path,
) -> None:
    with Engine(tiny_bundle) as engine:
        with held(loop_of(engine)) as turnstile:
            streams = [engine.submit(PROMPT, SamplingParams(ignore_eos=True)) for _ in range(20)]
            turnstile.wait()
            turnstile.before_next(engine.close)
        results = [stream.result() for stream in streams]
    engine.close()
    assert {result.finish_reason for result in results} == {FinishReason.CANCELLED}
    assert [len(result.token_ids) > 0 for result in results].count(True) <= 8
    assert engine.stats().num_waiting == engine.stats().num_running == 0
    with pytest.raises(EngineError, match="engine is closed"):
        engine.submit("hi")


def test_numpy_token_ids_become_plain_numbers(tiny_bundle: Path) -> None:
    with Engine(tiny_bundle) as engine:
        prompt = np.array([5, 6, 5, 6, 5, 6, 5])
        result = engine.submit(prompt, SamplingParams(max_tokens=12)).result()  # type: ignore[arg-type]
    json.dumps(result.token_ids)


def test_a_newer_schema_version_is_refused(copied: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 3, "new": 1}))
    with pytest.raises(BundleError, match="schema version 3; this specexport reads version 2"):
        Engine(copied)


def test_a_damaged_manifest_is_refused(copied: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    del manifest["target"]["head_dim"]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"damaged at 'target\.head_dim'"):
        Engine(copied)
    (copied / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match="cannot be read"):
        Engine(copied)
    (copied / "manifest.json").unlink()
    with pytest.raises(BundleError, match="holds no manifest"):
        Engine(copied)
    with pytest.raises(BundleError, match="is not a directory"):
        Engine(copied / "nowhere")


def test_nan_weights_end_in_a_clear_error(tiny_bundle: Path, copied: Path) -> None:
    path = copied / "target/model.weights"
    weights = np.fromfile(path, dtype=np.float32)
    weights[:] = np.nan
    weights.tofile(path)
    with Engine(copied, EngineOptions(verify_files=False)) as engine:
        with pytest.raises(EngineError, match="logit that is nan"):
            engine.submit("hello").result()
        assert engine.stats().num_running == 0


def test_the_public_names_exist_and_nothing_else() -> None:
    for name in specexport.__all__:
        assert getattr(specexport, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specexport.nothing  # noqa: B018 - the access is the test
