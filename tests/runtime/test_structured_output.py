"""Structured output of the tiny model: random weights reach any text that a grammar allows."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specexport import Engine, EngineOptions, FinishReason, SamplingParams
from specexport.errors import EngineError, RequestError
from specexport.export.build import BuildOptions, build
from specexport.export.methods import DraftMethod
from specexport.runtime.structure import Choice, Grammar, JsonSchema, Regex, Structure
from tests.tiny import EOS_ID, make_model, write_checkpoint
from tests.turnstile import held, loop_of

PROMPT = 'to be or not to be: {"name": "to be", "tags": ["or", "not"]}, {"name": "'
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "größe": {"type": "integer", "minimum": 10, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["or", "not", "日本", 'a"b']}, "maxItems": 3},
        "parent": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"alive": {"type": "boolean"}},
                    "required": ["alive"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "required": ["name", "größe", "tags", "parent"],
    "additionalProperties": False,
}
STRUCTURES: dict[str, Structure] = {
    "schema": JsonSchema(PERSON, one_line=True),
    "regex": Regex(r"[a-z]{3} (to|be|to be) [0-9]{2,4}(é|😀)"),
    "lark": Grammar('start: "(" (start | /[0-9]/) ")" | "[" WORD "]"\nWORD: /[A-Z]{1,3}/'),
    "gbnf": Grammar('root ::= "to " ("be" | "see")+ "."'),
    "choice": Choice(("to be", "not to be", "to see", "tö be")),
}
METHODS = {"ngram": 6, "suffix": 4, "draft": 3}


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a draft model whose weights are random too."""
    folder = tmp_path_factory.mktemp("draft")
    draft = write_checkpoint(folder / "qwen3", "qwen3", seed=7)
    build(str(tiny_checkpoint), folder / "bundle", BuildOptions(DraftMethod(), draft=str(draft)))
    return folder / "bundle"


def check(name: str, text: str) -> None:
    """The text is what the structure describes, by Python's own means."""
    structure = STRUCTURES[name]
    if isinstance(structure, JsonSchema):
        person = json.loads(text)
        assert list(person) == ["name", "größe", "tags", "parent"]
        assert 1 <= len(person["name"]) <= 4
        assert type(person["größe"]) is int
        assert 10 <= person["größe"] <= 999
        assert len(person["tags"]) <= 3
        assert set(person["tags"]) <= {"or", "not", "日本", 'a"b'}
        assert person["parent"] is None or type(person["parent"]["alive"]) is bool
        assert text == json.dumps(person, ensure_ascii=False) or "\\" in text
    elif isinstance(structure, Regex):
        assert re.fullmatch(structure.pattern, text)
    elif isinstance(structure, Choice):
        assert text in structure.choices
    elif name == "gbnf":
        assert re.fullmatch(r"to (be|see)+\.", text)
    else:
        core = text.strip("()")
        depth = (len(text) - len(core)) // 2
        assert text == "(" * depth + core + ")" * depth
        assert re.fullmatch(r"\d" if depth and core[0] != "[" else r"\[[A-Z]{1,3}\]", core)


@pytest.fixture(scope="module")
def plain(bundle: Path) -> dict[str, tuple[int, ...]]:
    with Engine(bundle, EngineOptions(method="none")) as engine:
        return {
            name: engine.submit(PROMPT, SamplingParams(max_tokens=150, structure=structure))
            .result()
            .token_ids
            for name, structure in STRUCTURES.items()
        }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_structured_output_is_the_same_with_every_drafter(
    method: Any, k: int, bundle: Path, plain: dict[str, tuple[int, ...]]
) -> None:
    """All structures at once, and requests without one between them."""
    options = EngineOptions(method=method, num_speculative_tokens=k, max_slots=4)
    with Engine(bundle, options) as engine:
        free = [engine.submit(PROMPT, SamplingParams(max_tokens=20)) for _ in range(2)]
        streams = {
            name: engine.submit(PROMPT, SamplingParams(max_tokens=150, structure=structure))
            for name, structure in STRUCTURES.items()
        }
        assert free[0].result().token_ids == free[1].result().token_ids
        for name, stream in streams.items():
            result = stream.result()
            assert result.token_ids == plain[name]
            if result.finish_reason is FinishReason.STOP:
                check(name, result.text)
        assert engine.stats().acceptance.num_drafts > 0


def test_greedy_structured_output_is_the_masked_argmax_of_pytorch(
    bundle: Path, plain: dict[str, tuple[int, ...]]
) -> None:
    """Byte by byte: of the texts that the choice still allows, the likeliest next byte."""
    model = make_model("llama")
    with Engine(bundle, EngineOptions(method="none")) as engine:
        ids = engine.tokenizer.encode(PROMPT)
        texts = [
            engine.tokenizer.encode(text) for text in ("to be", "not to be", "to see", "tö be")
        ]
    output: list[int] = []
    while output not in texts:
        going_on = [t for t in texts if t[: len(output)] == output]
        with torch.no_grad():
            logits = model(torch.tensor([ids + output])).logits[0, -1]
        output.append(max({t[len(output)] for t in going_on}, key=lambda i: float(logits[i])))
    assert list(plain["choice"]) == output


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_eight_structured_requests_at_once_with_n_gram_drafts_all_parse(
    temperature: float, bundle: Path
) -> None:
    with Engine(bundle, EngineOptions(method="ngram", adaptive=False, max_slots=8)) as engine:
        names = [*STRUCTURES, "schema", "schema", "regex"]
        # The random model would nest and repeat for ever.
        bias = {engine.tokenizer.encode(letter)[-1]: -30.0 for letter in "([se"}
        with held(loop_of(engine)):  # the steps begin when all have come
            streams = [
                engine.submit(
                    PROMPT,
                    SamplingParams(
                        max_tokens=180,
                        structure=STRUCTURES[name],
                        temperature=temperature,
                        seed=seed,
                        logit_bias=bias,
                    ),
                )
                for seed, name in enumerate(names)
            ]
            assert engine.stats().num_waiting == 8
        for name, stream in zip(names, streams, strict=True):
            result = stream.result()
            assert result.finish_reason is FinishReason.STOP
            assert result.stopped_by in (None, EOS_ID)
            check(name, result.text)
        assert engine.stats().acceptance.num_drafts > 0


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_sampled_choices_follow_pytorchs_masked_distribution(method: Any, bundle: Path) -> None:
    """χ² with fixed seeds; a right sampler fails one in 10,000 other choices of them."""
    choices, num_samples, temperature = ("to be", "too", "no", "not", "be"), 600, 2.0
    with Engine(bundle, EngineOptions(method=method, adaptive=False, max_slots=16)) as engine:
        streams = [
            engine.submit(
                PROMPT,
                SamplingParams(structure=Choice(choices), temperature=temperature, seed=seed),
            )
            for seed in range(num_samples)
        ]
        counts = Counter(stream.result().text for stream in streams)
        ids = engine.tokenizer.encode(PROMPT)
        texts = {choice: engine.tokenizer.encode(choice) for choice in choices}
        acceptance = engine.stats().acceptance
    model = make_model("llama")
    exact = {}
    for choice, tokens in texts.items():
        with torch.no_grad():
            logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 :].double()
        exact[choice] = 1.0
        for i, token_id in enumerate([*tokens, EOS_ID]):
            going_on = {t[i] for t in texts.values() if t[:i] == tokens[:i] and len(t) > i}
            may_end = tokens[:i] in texts.values()
            allowed = [*going_on, *([EOS_ID] if may_end else [])]
            if len(allowed) == 1:
                continue
            probs = torch.softmax(logits[i][allowed] / temperature, dim=0)
            exact[choice] *= float(probs[allowed.index(token_id)])
    assert sum(exact.values()) == pytest.approx(1.0)
    expected = [exact[choice] * num_samples for choice in choices]
    assert min(expected) > 5
    assert chisquare([counts[choice] for choice in choices], expected).pvalue > 1e-4
    assert acceptance.num_drafts > 100 or method == "ngram"


def test_a_structure_that_is_complete_needs_no_end_of_sequence_token(bundle: Path) -> None:
    with Engine(bundle) as engine:
        params = SamplingParams(structure=Choice(("to be",)))
        result = engine.submit(PROMPT, params).result()
    assert (result.text, len(result.token_ids)) == ("to be", 5)
    assert (result.finish_reason, result.stopped_by) == (FinishReason.STOP, None)
    assert result.stats.num_decode_steps == 0  # all was forced


def test_a_structure_that_may_go_on_leaves_the_end_to_the_model(bundle: Path) -> None:
    params = SamplingParams(structure=Regex("[a-f]*"), temperature=1.0, seed=1)
    with Engine(bundle) as engine:
        never, always = (
            engine.submit(
                PROMPT,
                SamplingParams(structure=Regex("[a-f]*"), max_tokens=40, logit_bias={EOS_ID: bias}),
            ).result()
            for bias in (-100.0, 100.0)
        )
        free = engine.submit(PROMPT, params).result()
    assert (never.finish_reason, len(never.text)) == (FinishReason.LENGTH, 40)
    assert (always.finish_reason, always.token_ids) == (FinishReason.STOP, (EOS_ID,))
    assert re.fullmatch("[a-f]*", free.text)


def test_max_tokens_inside_a_structure_ends_with_reason_length(bundle: Path) -> None:
    with Engine(bundle) as engine:
        whole = engine.submit(PROMPT, SamplingParams(structure=Choice(("to be", "not")))).result()
        for limit in range(1, len(whole.token_ids) + 1):
            params = SamplingParams(structure=Choice(("to be", "not")), max_tokens=limit)
            result = engine.submit(PROMPT, params).result()
            assert result.token_ids == whole.token_ids[:limit]
            is_whole = limit == len(whole.token_ids)
            assert result.finish_reason == ("stop" if is_whole else "length")


def test_several_outputs_follow_the_structure_each(bundle: Path) -> None:
    params = SamplingParams(structure=STRUCTURES["choice"], temperature=2.0, n=3, best_of=6, seed=3)
    with Engine(bundle) as engine:
        for result in engine.submit_many(PROMPT, params).results():
            check("choice", result.text)


def test_log_probabilities_stand_at_every_token_of_a_structure(bundle: Path) -> None:
    params = SamplingParams(
        structure=STRUCTURES["choice"], logprobs=True, logprobs_of="processed", top_logprobs=3
    )
    with Engine(bundle) as engine:
        result = engine.submit(PROMPT, params).result()
    assert result.logprobs is not None
    assert [found.token_id for found in result.logprobs] == list(result.token_ids)
    assert len(result.logprobs[0].top) == 2  # "t" and "n"
    assert result.logprobs[-1].logprob == 0.0  # forced


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore_eos": True}, "ignore_eos is True, but the structure decides where"),
        ({"min_tokens": 3}, "min_tokens is 3, but the structure decides"),
        ({"stop": ["x"]}, r"stop is \('x',\), but the structure decides"),
        ({"stop_token_ids": [3]}, r"stop_token_ids is \(3,\), but the structure decides"),
        ({"structure": "a+"}, "structure is 'a\\+'; it must be a JsonSchema, a Regex"),
    ],
)
def test_options_that_contradict_a_structure_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**{"structure": Regex("a+"), **options})


def test_a_refused_structure_queues_nothing(bundle: Path) -> None:
    with Engine(bundle) as engine:
        with pytest.raises(RequestError, match="The regular expression is refused: unclosed group"):
            engine.submit(PROMPT, SamplingParams(structure=Regex("a(")))
        for params in (
            SamplingParams(structure=Choice(("abc",)), allowed_token_ids=[5]),
            SamplingParams(structure=Choice(("abc",)), banned_token_ids=[64]),
        ):
            with pytest.raises(RequestError, match="rule out every token that the structure"):
                engine.submit(PROMPT, params)
        assert engine.stats().num_waiting == 0


def test_a_token_that_the_structure_needs_later_but_may_not_use_is_an_error(bundle: Path) -> None:
    with Engine(bundle) as engine:
        b = engine.tokenizer.encode("b")[0]
        params = SamplingParams(structure=Choice(("abc",)), banned_token_ids=[b])
        with pytest.raises(EngineError, match="No token is left to come"):
            engine.submit(PROMPT, params).result()
        assert engine.submit(PROMPT, SamplingParams(structure=Choice(("abc",)))).result().text
