"""The processor of a request: at every prefix what transformers' own processors give there."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.errors import EngineError
from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.params import SamplingParams
from specexport.runtime.processing import LogitsProcessor, TokenCounts
from specexport.runtime.tree import ROOT
from tests.hash_engine import hash_logits
from tests.reference_options import reference_probs, reference_scores, request_options

VOCAB_SIZE, EOS = 30, 0

texts = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=25)


@st.composite
def trees(draw: Any) -> Draft:
    token_ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8))
    parents = [draw(st.integers(ROOT, i - 1)) for i in range(len(token_ids))]
    probs = tuple(Distribution.one_hot(t) for t in token_ids)
    return Draft(tuple(token_ids), tuple(parents), probs)


def dense(distribution: Distribution) -> Any:
    probs = np.zeros(VOCAB_SIZE)
    probs[distribution.token_ids] = distribution.probs
    return probs


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@given(data=st.data(), prompt=texts, output=texts, tree=trees())
@settings(max_examples=400)
def test_each_drafted_position_gets_what_plain_decoding_gets_at_its_prefix(
    greedy: bool, data: st.DataObject, prompt: list[int], output: list[int], tree: Draft
) -> None:
    """Committed in runs of any length, and read at any node of any tree below."""
    options = data.draw(request_options(VOCAB_SIZE, [EOS], greedy=greedy))
    params = SamplingParams(**options)
    ends = {EOS, *params.stop_token_ids}
    prompt = [1, *prompt]
    processor = LogitsProcessor(params, prompt, ends)
    rest = list(output)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        processor.commit(rest[:size])
        rest = rest[size:]
    for node in range(ROOT, len(tree)):
        text = [*prompt, *output, *tree.path(node)]
        logits = hash_logits(text, vocab_size=VOCAB_SIZE)
        before = logits.copy()
        scores = reference_scores(logits, params, prompt, text, ends)
        # Penalties round once or twice in single precision.
        np.testing.assert_allclose(
            processor.scores(logits, tree.path(node)), scores.numpy(), rtol=1e-6, atol=1e-6
        )
        np.testing.assert_allclose(
            dense(processor.distribution(logits, tree.path(node))),
            reference_probs(scores, params),
            atol=1e-5,
        )
        np.testing.assert_array_equal(logits, before)


def test_a_tree_knows_the_tokens_above_each_node() -> None:
    draft = Draft((5, 7, 1, 2), (ROOT, ROOT, 0, 2), (Distribution.one_hot(0),) * 4)
    assert [draft.path(node) for node in range(ROOT, 4)] == [(), (5,), (7,), (5, 1), (5, 1, 2)]


@given(runs=st.lists(texts, max_size=8), path=texts)
@settings(max_examples=100)
def test_counts_are_those_of_the_whole_text(runs: list[list[int]], path: list[int]) -> None:
    counts = TokenCounts()
    for run in runs:
        counts.add(run)
    ids, found = counts.after(path)
    text = [*(t for run in runs for t in run), *path]
    assert dict(zip(ids.tolist(), found.tolist(), strict=True)) == {t: text.count(t) for t in text}
    again, _ = counts.after([])
    assert set(again.tolist()) == {t for run in runs for t in run}  # the path left no trace


def test_counts_grow_past_their_first_size() -> None:
    counts = TokenCounts()
    counts.add([*range(1000), *range(500)])
    ids, found = counts.after(())
    assert ids.tolist() == list(range(1000))
    assert found.tolist() == [2] * 500 + [1] * 500


@pytest.mark.parametrize(
    ("options", "token_id"),
    [
        ({"frequency_penalty": 0.5}, 1),  # 3 occurrences: 4 - 1.5 < 3
        ({"presence_penalty": 1.5}, 1),  # whatever the count
        ({"repetition_penalty": 2.0}, 2),  # the prompt's tokens too: 4 / 2 and 3 / 2 < 2.5
        ({"logit_bias": {3: 3.5}}, 3),
        ({"banned_token_ids": [0]}, 1),
        ({"allowed_token_ids": [2, 3]}, 2),
        ({}, 0),
    ],
)
def test_each_option_changes_the_greedy_token(options: dict[str, Any], token_id: int) -> None:
    """Worked by hand; an option that is silently ignored gives token 0."""
    logits = np.array([4.0, 3.0, 2.5, 1.0], dtype=np.float32)
    processor = LogitsProcessor(SamplingParams(**options), [1, 0])
    processor.commit([0, 0])
    assert processor.distribution(logits, [0]).token_ids.tolist() == [token_id]


def test_nothing_ends_an_output_before_min_tokens_and_anything_may_at_it() -> None:
    logits = np.array([4.0, 3.0, 2.0], dtype=np.float32)
    processor = LogitsProcessor(SamplingParams(min_tokens=3), [1], end_ids=[0, 1])
    processor.commit([2])
    found = [processor.distribution(logits, path).token_ids.tolist() for path in ([], [2], [2, 2])]
    assert found == [[2], [2], [0]]


class EvenThenOdd:
    """Allows even tokens after an even number of output tokens, odd ones after an odd number."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def allowed(self, path: Any) -> Any:
        return np.arange(VOCAB_SIZE) % 2 == (len(self.output) + len(path)) % 2

    def num_allowed(self, path: Any) -> int:
        raise AssertionError("for drafters alone")

    def forced(self, path: Any, max_tokens: int) -> tuple[int, ...]:
        return (7, 8)[:max_tokens]

    def is_complete(self, path: Any) -> bool:
        return len(self.output) + len(path) == 4

    def commit(self, token_ids: Any) -> None:
        self.output.extend(token_ids)


def test_a_constraint_is_asked_at_every_prefix_and_learns_what_is_committed() -> None:
    constraint = EvenThenOdd()
    params = SamplingParams(temperature=1.0, banned_token_ids=[4])
    processor = LogitsProcessor(params, [1], constraint=constraint)
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    assert processor.distribution(logits, []).token_ids.tolist() == [0, 2, *range(6, 30, 2)]
    assert processor.distribution(logits, [6]).token_ids.tolist() == list(range(1, 30, 2))
    processor.commit([2, 3, 6])
    assert constraint.output == [2, 3, 6]
    assert processor.distribution(logits, []).token_ids.tolist() == list(range(1, 30, 2))
    assert not processor.is_complete
    assert processor.completes([5])
    processor.commit([5])
    assert processor.is_complete


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (7, 8)),
        ({"repetition_penalty": 2.0, "logit_bias": {7: -9.0}}, (7, 8)),
        ({"banned_token_ids": [7]}, ()),
        ({"allowed_token_ids": [7, 9]}, ()),
        ({"logprobs": True}, ()),
        ({"prompt_logprobs": True}, ()),
    ],
)
def test_tokens_are_forced_unless_another_option_has_a_say(
    options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    processor = LogitsProcessor(SamplingParams(**options), [1], constraint=EvenThenOdd())
    assert processor.forced(9) == expected
    assert LogitsProcessor(SamplingParams(**options), [1]).forced(9) == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left_the_error_says_so(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[2])
    processor = LogitsProcessor(params, [1])
    logits = np.array([1.0, 2.0, -np.inf], dtype=np.float32)
    with pytest.raises(EngineError, match="No token is left"):
        processor.distribution(logits, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_options_the_logits_are_not_even_copied(temperature: float) -> None:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    processor = LogitsProcessor(SamplingParams(temperature=temperature, top_k=3), [1], [0])
    assert processor.scores(logits, [5]) is logits
