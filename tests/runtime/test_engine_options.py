"""Request options of the embedding API: log-probabilities, stop texts, several outputs, echo."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specexport import (
    Completion,
    Engine,
    EngineOptions,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)
from specexport.errors import RequestError
from specexport.export.build import BuildOptions, build
from specexport.export.methods import DraftMethod
from tests.noisy_draft import write_noisy_draft
from tests.tiny import EOS_ID, make_model
from tests.turnstile import held, loop_of

PROMPT = "to be or not to be, to be or"
TOLERANCE = 1e-4  # fp32 logits of ONNX Runtime and PyTorch: other orders of summation


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a draft model that is often right: itself with noise."""
    folder = tmp_path_factory.mktemp("draft")
    draft = write_noisy_draft(str(tiny_checkpoint), folder / "noisy")
    build(str(tiny_checkpoint), folder / "bundle", BuildOptions(DraftMethod(), draft=str(draft)))
    return folder / "bundle"


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


def forced(model: Any, text: Sequence[int]) -> torch.Tensor:
    """Teacher-forced logits [T, V] of PyTorch."""
    with torch.no_grad():
        return model(torch.tensor([list(text)])).logits[0]  # type: ignore[no-any-return]


def check_logprobs(found: Sequence[TokenLogprobs], token_ids: Sequence[int], rows: Any) -> None:
    """Each token's log-probability, and the likeliest ones in order, by rows of logits."""
    expected = torch.log_softmax(rows.double(), dim=-1).numpy()
    assert [f.token_id for f in found] == list(token_ids)
    for one, token_id, row in zip(found, token_ids, expected, strict=True):
        assert one.logprob == pytest.approx(row[token_id], abs=TOLERANCE)
        best = np.sort(row)[::-1][: len(one.top)]
        np.testing.assert_allclose([t.logprob for t in one.top], best, atol=TOLERANCE)
        np.testing.assert_allclose([row[t.token_id] for t in one.top], best, atol=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["none", "ngram", "draft"])
def test_logprobs_equal_a_teacher_forced_forward_at_every_position(
    bundle: Path, model: Any, method: Any, temperature: float
) -> None:
    """Raw ones, whatever options shape the output; in a batch of several lengths, in chunks."""
    options = EngineOptions(method=method, max_slots=3, step_tokens=24)
    params = SamplingParams(
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs=True,
        temperature=temperature,
        frequency_penalty=0.2,
        max_tokens=25,
        seed=3,
        ignore_eos=True,
    )
    with Engine(bundle, options) as engine:
        prompts = [engine.tokenizer.encode(PROMPT[i:] * (i + 1)) for i in range(4)]
        prompts.append([5])
        streams = [engine.submit(prompt, params) for prompt in prompts]
        results = [stream.result() for stream in streams]
        if method == "draft":  # accepted and rejected drafts are among them
            assert 0.1 < engine.stats().acceptance.rate < 0.9
    for prompt, result in zip(prompts, results, strict=True):
        rows = forced(model, [*prompt, *result.token_ids])
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids) == 25
        assert any(found.logprob != 0.0 for found in result.logprobs)
        check_logprobs(result.logprobs, result.token_ids, rows[len(prompt) - 1 : -1])
        assert result.prompt_logprobs is not None
        first, *others = result.prompt_logprobs
        assert first is None
        check_logprobs([o for o in others if o], prompt[1:], rows[: len(prompt) - 1])


def test_a_long_prompt_is_scored_a_few_rows_at_a_time(
    bundle: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(method="none", step_tokens=256)
    with Engine(bundle, options) as engine:
        sizes = []
        run = loop_of(engine)._target.run

        def counted(step: Any) -> Any:
            sizes.append(len(step.logits_indices))
            return run(step)

        monkeypatch.setattr(loop_of(engine)._target, "run", counted)
        prompt = [i % 250 for i in range(200)]
        params = SamplingParams(prompt_logprobs=True, max_tokens=1)
        result = engine.submit(prompt, params).result()
    assert sizes == [64, 64, 64, 8]
    assert result.logprobs is None
    assert result.prompt_logprobs is not None
    found = [one for one in result.prompt_logprobs if one]
    check_logprobs(found, prompt[1:], forced(model, prompt)[:-1])


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_processed_logprobs_are_those_of_the_distribution_drawn_from(
    bundle: Path, model: Any, method: Any
) -> None:
    params = SamplingParams(
        logprobs=True,
        top_logprobs=50,
        logprobs_of="processed",
        temperature=0.7,
        top_k=9,
        repetition_penalty=1.4,
        seed=5,
        max_tokens=20,
        ignore_eos=True,
    )
    with Engine(bundle, EngineOptions(method=method)) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        result = engine.submit(prompt, params).result()
    text = [*prompt, *result.token_ids]
    assert result.logprobs is not None
    for i, found in enumerate(result.logprobs):
        ids = torch.tensor([text[: len(prompt) + i]])
        scores = forced(model, ids[0].tolist())[-1:].double()
        for warper in (
            transformers.RepetitionPenaltyLogitsProcessor(1.4),
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(9),
        ):
            scores = warper(ids, scores)
        expected = torch.log_softmax(scores[0], dim=-1).numpy()
        assert found.logprob == pytest.approx(expected[found.token_id], abs=TOLERANCE)
        assert len(found.top) == 9  # no others can come
        for one in found.top:
            assert one.logprob == pytest.approx(expected[one.token_id], abs=TOLERANCE)


def test_processed_logprobs_at_temperature_0_are_not_all_zero(bundle: Path) -> None:
    params = SamplingParams(logprobs=True, logprobs_of="processed", max_tokens=8)
    with Engine(bundle) as engine:
        processed = engine.submit(PROMPT, params).result()
        raw = engine.submit(PROMPT, SamplingParams(logprobs=True, max_tokens=8)).result()
    assert processed.logprobs is not None
    assert raw.logprobs is not None
    for one, other in zip(processed.logprobs, raw.logprobs, strict=True):
        # Nothing was processed; adaptive drafts, and with them sums, differ between the two.
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def check_cut(result: Completion, tokens: Sequence[int], decode: Any, stop: str) -> None:
    """Ids, log-probabilities and text end together, at the first stop text of `tokens`."""
    whole = next(i for i in range(1, len(tokens) + 1) if stop in decode(tokens[:i]))
    assert result.token_ids == tuple(tokens[:whole])
    assert result.logprobs is not None
    assert [one.token_id for one in result.logprobs] == list(tokens[:whole])
    assert result.text == decode(tokens).split(stop)[0]
    assert result.finish_reason is FinishReason.STOP
    assert result.stopped_by == stop


@pytest.mark.parametrize("method", ["none", "ngram", "draft"])
def test_a_stop_text_ends_text_ids_and_logprobs_together_inside_an_accepted_run(
    bundle: Path, method: Any
) -> None:
    """Every pair of neighbouring characters of the output in turn is the stop text."""
    options = EngineOptions(method=method, num_speculative_tokens=None if method == "none" else 8)
    with Engine(bundle, options) as engine:
        decode = engine.tokenizer.decode
        free = engine.submit(PROMPT, SamplingParams(max_tokens=40)).result()
        stops = {free.text[i : i + 2] for i in range(len(free.text) - 1)}
        assert free.stopped_by is None
        for stop in sorted(s for s in stops if "�" not in s)[:12]:
            params = SamplingParams(max_tokens=40, stop=stop, logprobs=True)
            stream = engine.submit(PROMPT, params)
            assert not any(stop in chunk.text for chunk in stream)
            check_cut(stream.result(), free.token_ids, decode, stop)
            kept = engine.submit(
                PROMPT, SamplingParams(max_tokens=40, stop=["never", stop], include_stop=True)
            ).result()
            assert kept.text == free.text[: free.text.index(stop) + len(stop)]


def test_a_stop_token_stays_in_the_ids_and_in_the_text_only_if_asked(bundle: Path) -> None:
    values: dict[str, Any] = {"max_tokens": 20, "allowed_token_ids": range(97, 123)}
    values["frequency_penalty"] = 2.0  # no token twice in a row
    with Engine(bundle) as engine:
        decode = engine.tokenizer.decode
        free = engine.submit(PROMPT, SamplingParams(**values)).result()
        stop = free.token_ids[5]
        place = free.token_ids.index(stop)
        without = engine.submit(PROMPT, SamplingParams(**values, stop_token_ids=[stop])).result()
        params = SamplingParams(**values, stop_token_ids=[stop], include_stop=True)
        kept = engine.submit(PROMPT, params).result()
    for result in (without, kept):
        assert result.token_ids == free.token_ids[: place + 1]
        assert (result.finish_reason, result.stopped_by) == (FinishReason.STOP, stop)
    assert without.text == decode(free.token_ids[:place])
    assert kept.text == decode(free.token_ids[: place + 1])


def test_several_outputs_are_those_of_their_seeds_one_by_one(bundle: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12)
    with Engine(bundle, EngineOptions(max_slots=2)) as engine:
        results = engine.submit_many(PROMPT, params).results()
        alone = [engine.submit(PROMPT, choice).result() for choice in params.choices()]
        group = engine.submit_many(PROMPT, params)
        chunks = list(group)
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]
    assert len({r.token_ids for r in results}) == 3
    assert all(r.logprobs is None for r in results)
    for index, result in enumerate(results):
        assert "".join(chunk.text for i, chunk in chunks if i == index) == result.text
        assert [c.finish_reason for i, c in chunks if i == index][-1] == result.finish_reason


def test_the_best_outputs_are_those_with_the_highest_mean_logprob(bundle: Path, model: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=2, n=2, best_of=6, max_tokens=10)
    with Engine(bundle) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        best = engine.submit_many(prompt, params).results()
        drawn = [engine.submit(prompt, choice).result() for choice in params.choices()]
        with pytest.raises(RequestError, match="which outputs are kept is known in the end"):
            next(iter(engine.submit_many(prompt, params)))

    def score(result: Completion) -> float:
        rows = torch.log_softmax(forced(model, [*prompt, *result.token_ids]).double(), dim=-1)
        rows = rows[len(prompt) - 1 : -1]
        return float(rows[range(len(rows)), list(result.token_ids)].mean())

    expected = sorted(drawn, key=score, reverse=True)[:2]
    assert [r.token_ids for r in best] == [r.token_ids for r in expected]
    assert all(r.logprobs is None for r in best)


@pytest.mark.parametrize("option", ["n", "best_of"])
def test_several_outputs_are_refused_where_one_is_given(bundle: Path, option: str) -> None:
    with Engine(bundle) as engine:
        params = SamplingParams(**{"temperature": 1.0, option: 3})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=f"{option} is 3, .* Use `submit_many`"):
            engine.submit(PROMPT, params)


def test_a_cancelled_group_ends(bundle: Path) -> None:
    with Engine(bundle) as engine, held(loop_of(engine)) as turnstile:
        group = engine.submit_many(PROMPT, SamplingParams(temperature=1.0, n=2, ignore_eos=True))
        turnstile.wait()
        group.cancel()
        turnstile.let()
        results = group.results()
    assert {result.finish_reason for result in results} == {FinishReason.CANCELLED}
    assert all(result.token_ids for result in results)  # what the step gave


def test_echo_puts_the_prompt_in_front_and_stop_texts_do_not_look_at_it(bundle: Path) -> None:
    values: dict[str, Any] = {"max_tokens": 12}
    with Engine(bundle) as engine:
        plain = engine.submit(PROMPT, SamplingParams(**values)).result()
        echoed = engine.submit(PROMPT, SamplingParams(**values, echo=True, stop="to be")).result()
        ids = engine.tokenizer.encode(PROMPT)
        from_ids = engine.submit(ids, SamplingParams(**values, echo=True))
        chunks = list(from_ids)
    assert echoed.text == PROMPT + plain.text
    assert echoed.token_ids == plain.token_ids
    assert "".join(chunk.text for chunk in chunks) == PROMPT + plain.text


def test_options_in_a_mixed_batch_give_what_they_give_alone(bundle: Path) -> None:
    batch: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "min_p": 0.05, "seed": 1},
        {"repetition_penalty": 1.5, "stop": "e"},
        {"temperature": 1.0, "typical_p": 0.8, "presence_penalty": 1.0, "seed": 2},
        {"logit_bias": {101: 5.0}, "min_tokens": 15},
        {"temperature": 1.0, "allowed_token_ids": range(97, 123), "seed": 3, "logprobs": True},
        {"prompt_logprobs": True, "banned_token_ids": [101]},
    ]
    wanted = [SamplingParams(max_tokens=20, **options) for options in batch]
    with Engine(bundle, EngineOptions(max_slots=4)) as engine:
        streams = [engine.submit(PROMPT * (1 + i % 3), p) for i, p in enumerate(wanted)]
        together = [stream.result() for stream in streams]
        alone = [engine.submit(PROMPT * (1 + i % 3), p).result() for i, p in enumerate(wanted)]
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
    assert all(97 <= token_id < 123 for token_id in together[5].token_ids)


def test_greedy_with_penalties_equals_transformers_generate(bundle: Path, model: Any) -> None:
    config = transformers.GenerationConfig(
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        repetition_penalty=1.3,
        min_new_tokens=20,
        suppress_tokens=[101, 32],
        sequence_bias=[[[110], 2.0]],
    )
    params = SamplingParams(
        max_tokens=30,
        repetition_penalty=1.3,
        min_tokens=20,
        banned_token_ids=[101, 32],
        logit_bias={110: 2.0},
    )
    with Engine(bundle) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        result = engine.submit(prompt, params).result()
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), generation_config=config
    )
    assert list(result.token_ids) == output[0, len(prompt) :].tolist()
