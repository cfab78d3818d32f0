"""The real SmolLM2-135M-Instruct: greedy identity, logits, acceptance, a real cache."""

import inspect
import json
import re
import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.engines.ort import OrtRunner
from specexport.engines.step import Profile
from specexport.export.build import BuildOptions, build
from specexport.export.manifest import read_manifest
from specexport.export.methods import DraftMethod
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import FinishReason
from specexport.runtime.structure import Choice, Grammar, JsonSchema, Regex, Structure
from specexport.validation.distribution import compare_distribution
from specexport.validation.logits import compare_logits
from specexport.validation.reference import Reference
from tests.noisy_draft import write_noisy_draft

pytestmark = pytest.mark.model

NUM_PROMPTS, NUM_TOKENS = 104, 24
MODULES = (
    *("textwrap", "heapq", "bisect", "shutil", "random", "statistics", "fractions", "queue"),
    *("glob", "csv", "string"),
)
TASKS = (
    "Repeat this function, adding a docstring:\n\n{}",
    "Explain in one sentence what this function does:\n\n{}",
    "{}",
)


def real_prompts() -> list[str]:
    """Requests about functions of Python's own library, of many lengths."""
    sources = []
    for name in MODULES:
        members = inspect.getmembers(import_module(name), inspect.isroutine)
        classes = inspect.getmembers(import_module(name), inspect.isclass)
        members += [m for _, cls in classes for m in vars(cls).items() if inspect.isfunction(m[1])]
        for _, function in members:
            if inspect.isfunction(function) and function.__module__ == name:
                sources.append(inspect.getsource(function)[:240])
    assert len(sources) >= NUM_PROMPTS
    return [TASKS[i % 3].format(source) for i, source in enumerate(sources[:NUM_PROMPTS])]


@pytest.fixture(scope="module")
def bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with a noisy copy of itself as the draft model."""
    folder = tmp_path_factory.mktemp("noisy")
    draft = write_noisy_draft(str(smollm2_gguf), folder / "draft")
    options = BuildOptions(DraftMethod(), draft=str(draft), max_length=2048)
    build(str(smollm2_gguf), folder / "bundle", options)
    shutil.rmtree(draft)
    return folder / "bundle"


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Reference:
    return Reference(str(smollm2_gguf))


def outputs(bundle: Path, prompts: Sequence[str], **options: Any) -> list[tuple[int, ...]]:
    with Engine(bundle, EngineOptions(verify_files=False, **options)) as engine:
        streams = [engine.submit(p, SamplingParams(max_tokens=NUM_TOKENS)) for p in prompts]
        return [stream.result().token_ids for stream in streams]


@pytest.fixture(scope="module")
def plain(bundle: Path) -> list[tuple[int, ...]]:
    return outputs(bundle, real_prompts(), method="none")


@pytest.mark.parametrize(
    ("method", "num_prompts"), [("ngram", NUM_PROMPTS), ("suffix", 24), ("draft", 24)]
)
def test_greedy_with_speculation_equals_plain_on_real_prompts(
    method: str, num_prompts: int, bundle: Path, plain: list[tuple[int, ...]]
) -> None:
    """Each prompt with one K from 1 to 8; `benchmarks.greedy_identity` runs every K on all."""
    prompts = real_prompts()
    for k in range(1, 9):
        chosen = range(k - 1, num_prompts, 8)
        found = outputs(
            bundle, [prompts[i] for i in chosen], method=method, num_speculative_tokens=k
        )
        assert found == [plain[i] for i in chosen], f"K = {k}"


def test_logits_equal_pytorch_at_two_thousand_positions(
    bundle: Path, reference: Reference, plain: list[tuple[int, ...]]
) -> None:
    manifest = read_manifest(bundle)
    with Engine(bundle, EngineOptions(method="none", verify_files=False)) as engine:
        encoded = [engine.tokenizer.encode(p) for p in real_prompts()[:26]]
    texts = [[*ids, *output] for ids, output in zip(encoded, plain, strict=False)]
    profile = Profile(max_length=1024)
    with OrtRunner(bundle / manifest.target.path, manifest.target, profile) as runner:
        report = compare_logits(reference, runner, texts, 1e-3)
    assert report.num_positions >= 2000
    assert report.max_abs_diff <= 1e-3
    assert report.top1_agreement == 1.0
    assert report.max_kl < 1e-8


def test_greedy_equals_transformers_generate(
    bundle: Path, reference: Reference, plain: list[tuple[int, ...]]
) -> None:
    manifest = read_manifest(bundle)
    with Engine(bundle, EngineOptions(method="none", verify_files=False)) as engine:
        encoded = [engine.tokenizer.encode(p) for p in real_prompts()[:4]]
    for ids, output in zip(encoded, plain, strict=False):
        assert reference.greedy(ids, NUM_TOKENS, manifest.eos_token_ids) == list(output)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_sampled_outputs_follow_pytorchs_distribution(
    method: Any, bundle: Path, reference: Reference
) -> None:
    """χ² with fixed seeds; a right sampler would fail one in 10,000 other choices of them."""
    options = EngineOptions(
        method=method, adaptive=False, max_slots=16, max_length=64, verify_files=False
    )
    with Engine(bundle, options) as engine:
        prompt = engine.tokenizer.encode("one two three, one two three, one two")
        report = compare_distribution(reference, engine, prompt, 500)
    assert report.passed
    assert report.num_cells >= 8
    assert report.num_drafts >= 500


@pytest.mark.parametrize(
    ("method", "floors"),
    [
        ("ngram", [0.6, 0.5, 0.4, 0.3]),
        ("suffix", [0.4, 0.3, 0.2, 0.2]),  # a match of one token counts; its draft has two
        ("draft", [0.7, 0.5, 0.4, 0.3]),
    ],
)
def test_acceptance_has_a_floor_at_each_position(
    method: Any, floors: list[float], bundle: Path
) -> None:
    """A broken drafter hides behind a correct verifier. Measured: 0.90 0.80 0.73 0.67 (n-gram)."""
    options = EngineOptions(method=method, num_speculative_tokens=4, verify_files=False)
    with Engine(bundle, options) as engine:
        for prompt in real_prompts()[:24:3]:
            message = {"role": "user", "content": prompt}
            engine.submit_chat([message], SamplingParams(max_tokens=32))
        assert engine.drain()
        acceptance = engine.stats().acceptance
    rates = [a / acceptance.num_drafts for a in acceptance.accepted]
    assert all(rate >= floor for rate, floor in zip(rates, floors, strict=True)), rates


def test_a_real_answer_reads_like_one(bundle: Path) -> None:
    message = {"role": "user", "content": "What is the capital of France? Answer with one word."}
    with Engine(bundle, EngineOptions(verify_files=False)) as engine:
        answer = engine.submit_chat([message], SamplingParams(max_tokens=32)).result()
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_greedy_with_options_and_speculation_equals_plain_on_real_prompts(bundle: Path) -> None:
    """Each option, and all together, in one mixed batch; text, ids and scores end together."""
    batch: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.6, "presence_penalty": 0.4},
        {"logit_bias": {28: 3.0, 198: -4.0}},
        {"banned_token_ids": [198, 28, 30]},
        {"min_tokens": 16},
        {"stop": ["\n\n", " the "], "logprobs": True},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "min_tokens": 12, "stop": "return"},
    ]
    prompts = real_prompts()[: 3 * len(batch) : 3]

    def results(**options: Any) -> list[tuple[str, tuple[int, ...]]]:
        with Engine(bundle, EngineOptions(verify_files=False, **options)) as engine:
            streams = [
                engine.submit(prompt, SamplingParams(max_tokens=16, **wanted))
                for prompt, wanted in zip(prompts, batch, strict=True)
            ]
            completions = [stream.result() for stream in streams]
        assert all(len(c.logprobs) == len(c.token_ids) for c in completions if c.logprobs)
        return [(completion.text, completion.token_ids) for completion in completions]

    plain = results(method="none")
    for method in ("ngram", "draft"):
        assert results(method=method, num_speculative_tokens=5) == plain


def test_logprobs_through_speculation_equal_pytorchs(bundle: Path, reference: Reference) -> None:
    params = SamplingParams(max_tokens=24, logprobs=True, prompt_logprobs=True)
    options = EngineOptions(method="draft", adaptive=False, verify_files=False)
    with Engine(bundle, options) as engine:
        prompt = engine.tokenizer.encode(real_prompts()[3])
        result = engine.submit(prompt, params).result()
        assert result.stats.acceptance.rate > 0.3
    text = [*prompt, *result.token_ids]
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    found = [one.logprob for one in (*result.prompt_logprobs[1:], *result.logprobs) if one]
    logits = reference.logits(text)[:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    rows = expected[np.arange(len(text) - 1), text[1:]]
    np.testing.assert_allclose(found, rows, atol=1e-3)  # the tolerance of the logits above


TEXT = {"type": "string", "maxLength": 40}


def person_schema(*, one_line: bool) -> JsonSchema:
    properties = {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {
            "type": "array",
            "items": {"enum": ["young", "old", "été", "日本"]},
            "maxItems": 2,
        },
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return JsonSchema(schema, one_line=one_line)


STRUCTURES: list[tuple[str, Structure]] = [
    ("Describe Zoë, 36, from London, as JSON.", person_schema(one_line=False)),
    ("Describe the painter Müller as JSON.", person_schema(one_line=True)),
    ("Describe 東京の田中さん as JSON.", person_schema(one_line=True)),
    ("Is the sky blue? Answer yes or no.", Choice(("yes", "no", "maybe"))),
    ("When did the war end?", Regex(r"(In|Around) [0-9]{4}( or [0-9]{4})?\.")),
    ("Name three fruits.", Grammar('start: "- " W ("\\n- " W){2}\nW: /[A-Z][a-zäöü]{2,9}/')),
    ("List two cities as JSON.", JsonSchema({"type": "array", "items": TEXT, "maxItems": 3})),
    ("Count to five as JSON.", JsonSchema({"items": {"type": "integer"}, "type": "array"})),
]


def parses(structure: Structure, text: str) -> bool:
    if isinstance(structure, JsonSchema):
        value = json.loads(text)
        return list(value) == ["name", "age", "tags"] if isinstance(value, dict) else True
    if isinstance(structure, Choice):
        return text in structure.choices
    pattern = structure.pattern if isinstance(structure, Regex) else "- .*\n- .*\n- .*"
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_eight_structured_requests_at_once_parse_and_equal_plain_decoding(
    temperature: float, bundle: Path
) -> None:
    """Drafts that are certain do not change a seeded output; sampled ones only greedy output."""

    def results(**options: Any) -> list[tuple[str, tuple[int, ...], str]]:
        with Engine(bundle, EngineOptions(verify_files=False, max_slots=9, **options)) as engine:
            free = engine.submit(real_prompts()[0], SamplingParams(max_tokens=20))
            streams = [
                engine.submit_chat(
                    [{"role": "user", "content": prompt}],
                    SamplingParams(
                        max_tokens=160, structure=structure, temperature=temperature, seed=seed
                    ),
                )
                for seed, (prompt, structure) in enumerate(STRUCTURES)
            ]
            found = [stream.result() for stream in [free, *streams]]
            assert options["method"] == "none" or engine.stats().acceptance.num_drafts > 0
        return [(one.text, one.token_ids, one.finish_reason) for one in found]

    plain = results(method="none")
    for (_, structure), (text, _, reason) in zip(STRUCTURES, plain[1:], strict=True):
        assert reason == "stop"
        assert parses(structure, text)
    for method in ("ngram", "suffix", "draft"):
        found = results(method=method)
        if temperature == 0 or method != "draft":
            assert found == plain
        for (_, structure), (text, _, reason) in zip(STRUCTURES, found[1:], strict=True):
            assert reason == "stop"
            assert parses(structure, text)


STORM: dict[str, dict[str, Any]] = {
    "n-gram, adaptive": {"method": "ngram"},
    "draft model, adaptive": {"method": "draft"},
    "draft model, drawn": {"method": "draft", "adaptive": False},
}


@pytest.mark.parametrize("name", STORM)
def test_arrivals_cancellations_and_preemptions_change_no_output(name: str, bundle: Path) -> None:
    """Seeded requests that begin alike, in three slots: each gets what it gets alone."""
    options = {"max_length": 512, "verify_files": False, **STORM[name]}
    beginning = "You are a helpful assistant. Answer in one sentence, and be friendly.\n\n"
    prompts = [beginning + prompt[:300] for prompt in real_prompts()[:12]]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), top_p=0.95, seed=i, max_tokens=16)
        for i in range(len(prompts))
    ]
    with Engine(bundle, EngineOptions(max_slots=3, **options)) as engine:
        streams = []
        for i, prompt in enumerate(prompts):
            streams.append(engine.submit(prompt, params[i], priority=int(i % 4 == 3)))
            if i % 3 == 2:
                next(iter(streams[-1]))  # the next ones arrive while these run
        for cancelled in streams[4::5]:
            cancelled.cancel()
        found = [stream.result() for stream in streams]
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefixes.num_hits >= len(prompts) // 2
    alone = EngineOptions(max_slots=1, prefix_cache_mb=0, **options)
    with Engine(bundle, alone) as engine:
        for prompt, wanted, output in zip(prompts, params, found, strict=True):
            expected = engine.submit(prompt, wanted).result().token_ids
            if output.finish_reason is FinishReason.CANCELLED:
                expected = expected[: len(output.token_ids)]
            assert output.token_ids == expected
