"""The decide graph on ONNX Runtime against the NumPy verifier, token for token, and on TensorRT."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from scipy import stats

from specexport.errors import ConfigError
from specexport.export.decide.graph import build_decide
from specexport.export.manifest import MOST_CANDIDATES, DecideSpec
from specexport.export.tensorrt.library import find_library
from specexport.export.tensorrt.lint import lint
from specexport.export.tensorrt.plan import PlanOptions, build_plan
from specexport.export.tensorrt.profiles import Limits, make_profiles
from specexport.runtime.distribution import Distribution, to_distribution
from specexport.runtime.draft import Draft
from specexport.runtime.logprobs import raw_logprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.tree import ROOT
from tests.decide_tools import Case, certain_tree, drawn_chain, in_graph

FALSE_ALARM_RATE = 1e-5
VOCAB_SIZES = [1, 12, 64, 70, 1000, 1024, 1100, 3000]
KINDS = ["none", "certain chain", "certain tree", "drawn chain"]


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    def one_of(*values: Any) -> Any:
        return rng.choice(values).item()

    def ids(count: int) -> list[int]:
        return np.unique(rng.integers(1, vocab_size, count)).tolist() if vocab_size > 9 else []

    bias = {token_id: one_of(-3.0, 0.5, 4.0) for token_id in ids(3)}
    banned = [token_id for token_id in ids(3) if token_id not in bias]
    return SamplingParams(
        temperature=one_of(0.0, 0.3, 1.0, 2.0),
        top_k=one_of(0, 0, 1, 5, 50, 5000),
        top_p=one_of(1.0, 1.0, 1e-6, 0.5, 0.95),
        min_p=one_of(0.0, 0.0, 0.05, 1.0),
        repetition_penalty=one_of(1.0, 0.8, 1.3),
        frequency_penalty=one_of(0.0, 0.4),
        presence_penalty=one_of(0.0, -0.7),
        logit_bias=bias,
        banned_token_ids=banned,
        min_tokens=one_of(0, 7) if vocab_size > 9 else 0,
        seed=int(rng.integers(2**63)),
        logprobs=True,
    )


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Any:
    """Some with many ties, some with many tokens that cannot come; now and then flat."""
    logits = rng.normal(0, rng.choice([0.01, 2.0, 4.0]), (num_rows, vocab_size))
    if rng.random() < 0.3:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, 0] = 0.0
    return logits.astype(np.float32)


def random_tree(rng: np.random.Generator, logits: Any) -> Draft:
    """Likely tokens, siblings all different, below any node or the text."""
    token_ids: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    for node in range(len(logits) - 1):
        parent = int(rng.integers(ROOT, node))
        noisy = logits[parent - ROOT] + rng.normal(0, 1, logits.shape[1])
        order = [t for t in np.argsort(-noisy)[:9].tolist() if (parent, t) not in taken]
        if not order:
            break
        taken.add((parent, order[0]))
        token_ids.append(order[0])
        parents.append(parent)
    return certain_tree(token_ids, parents)


def random_case(rng: np.random.Generator, vocab_size: int, kind: str) -> Case:
    num_nodes = 0 if kind == "none" else int(rng.integers(1, 6))
    params = random_params(rng, vocab_size)
    logits = random_logits(rng, num_nodes + 1, vocab_size)
    text = rng.integers(0, vocab_size, 8).tolist()
    noisy = logits + rng.normal(0, 0.2, logits.shape).astype(np.float32)
    draft = Draft.certain(noisy[:num_nodes].argmax(axis=1).tolist())
    if kind == "certain tree":
        draft = random_tree(rng, logits)
        logits = logits[: len(draft) + 1]
    elif kind == "drawn chain" and params.temperature:
        draft = drawn_chain(noisy, params, num_nodes, len(text))
    return Case.of(params, draft, logits, text, num_prompt=3, end_ids=[vocab_size - 1])


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_graph_gives_the_verifiers_tokens(vocab_size: int) -> None:
    """Also of requests with all kinds of drafts in one call; random, but always the same."""
    rng = np.random.default_rng(vocab_size)
    num_accepted, num_left = Counter[int](), 0
    for _ in range(150):
        kinds = [str(rng.choice(KINDS)) for _ in range(rng.integers(1, 5))]
        cases = [random_case(rng, vocab_size, kind) for kind in kinds]
        for case, found in zip(cases, in_graph(cases), strict=True):
            try:
                expected = case.on_host()
            except Exception:
                assert found is None  # no token is left
                continue
            if found is None:
                assert needs_host(case)
                num_left += 1
                continue
            assert found.verdict == expected
            num_accepted[expected.num_accepted] += 1
            compare_logprobs(case, found)
    assert num_left < 75
    assert vocab_size < 9 or min(num_accepted[n] for n in range(4)) > 2


def needs_host(case: Case) -> bool:
    """Whether top-p keeps more tokens than the graph looks at, somewhere on the walk."""
    request, draft = case.turn.request, case.turn.draft
    params = replace(request.params, min_p=0.0)  # which comes after it
    places = (ROOT, *case.on_host().path)
    scores = [
        request.processor.scores(case.logits[node - ROOT], draft.path(node)) for node in places
    ]
    sizes = [len(to_distribution(row, params).token_ids) for row in scores]
    return params.top_p < 1 and max(sizes) > MOST_CANDIDATES


def compare_logprobs(case: Case, found: Any) -> None:
    verdict = found.verdict
    for node, token_id, logprob in zip(
        (ROOT, *verdict.path), verdict.token_ids, found.logprobs, strict=True
    ):
        expected = raw_logprobs(case.logits[node - ROOT], token_id, 0)
        assert logprob.token_id == token_id
        # Single precision, where the host sums in double.
        np.testing.assert_allclose(logprob.logprob, expected.logprob, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.9}])
def test_pairs_of_tokens_of_a_drawn_chain_follow_the_target(options: dict[str, Any]) -> None:
    """χ² over two tokens; what a rejected draft leaves open, a step without a draft adds.

    Every pair is expected 15 times or more. Were a rejected token replaced by one of the target's
    own instead of the remainder's, the test would fail with a probability above 0.99.
    """
    rng = np.random.default_rng(5)
    logits, drafter = rng.normal(0, 1, (2, 3, 4)).astype(np.float32)
    targets = [to_distribution(row, SamplingParams(temperature=1, **options)) for row in logits]
    counts, num_samples = Counter[tuple[int, ...]](), 2000
    for first in range(0, num_samples, 250):
        params = [
            SamplingParams(temperature=1, seed=seed, **options)
            for seed in range(first, first + 250)
        ]
        pairs = _tokens([Case.of(p, drawn_chain(drafter, p, 2, 2), logits) for p in params])
        rest = [i for i, tokens in enumerate(pairs) if len(tokens) == 1]
        more = [
            Case.of(params[i], Draft(), logits[1:2], text=[1, 2, *pairs[i]], num_prompt=2)
            for i in rest
        ]
        for i, tokens in zip(rest, _tokens(more), strict=True):
            pairs[i] += tokens
        counts.update(tokens[:2] for tokens in pairs)
    wanted = {(a, b): targets[0].prob(a) * targets[1].prob(b) for a in range(4) for b in range(4)}
    possible = [pair for pair, prob in wanted.items() if prob > 0]
    assert set(counts) <= set(possible)
    expected = num_samples * np.array([wanted[pair] for pair in possible])
    observed = [counts[pair] for pair in possible]
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM_RATE


def _tokens(cases: list[Case]) -> list[tuple[int, ...]]:
    found = in_graph(cases)
    return [decided.verdict.token_ids for decided in found if decided is not None]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", [False, True])
def test_logits_that_give_no_token_are_left_to_the_host(
    bad: float, temperature: float, drafted: bool
) -> None:
    """One bad logit is enough, if it is no -inf; the other requests of the call are decided."""
    good = np.random.default_rng(0).normal(0, 1, (1 + drafted, 300)).astype(np.float32)
    logits = good.copy()
    logits[-1, :] = bad if bad == -np.inf else logits[-1, :]
    logits[-1, 170] = bad
    params = SamplingParams(temperature=temperature)
    draft = Draft.certain([Case.of(params, Draft(), good).on_host().token_ids[0]] * drafted)
    cases = [Case.of(params, draft, rows) for rows in (good, logits, good)]
    assert [found is None for found in in_graph(cases)] == [False, True, False]


def test_a_bad_row_below_a_rejected_node_does_not_matter() -> None:
    logits = np.zeros((2, 80), dtype=np.float32)
    logits[0, 5], logits[1] = 9.0, np.nan
    (found,) = in_graph([Case.of(SamplingParams(), Draft.certain([6]), logits)])
    assert found is not None
    assert found.verdict.token_ids == (5,)


def test_a_request_whose_options_leave_no_token_is_left_to_the_host() -> None:
    params = SamplingParams(temperature=1.0, banned_token_ids=[0, 2])
    logits = np.array([[1.0, -np.inf, 2.0]], dtype=np.float32)
    assert in_graph([Case.of(params, Draft(), logits)]) == [None]


def test_of_equal_logits_top_p_keeps_the_first_also_where_most_are_not_looked_at() -> None:
    """900 tokens of weight e, then of 2,100 of weight 1 those of the 100 lowest ids."""
    rng = np.random.default_rng(0)
    logits = np.zeros((1, 3000), dtype=np.float32)
    logits[0, rng.permutation(3000)[:900]] = 1.0
    for seed in range(60):
        case = Case.of(SamplingParams(temperature=1.0, top_p=0.56, seed=seed), Draft(), logits)
        (found,) = in_graph([case])
        assert found is not None
        assert found.verdict == case.on_host()


@pytest.mark.parametrize(("top_p", "is_left"), [(0.3, False), (0.9, True), (1.0, False)])
def test_a_top_p_that_takes_too_many_tokens_is_left_to_the_host(
    top_p: float, is_left: bool
) -> None:
    logits = np.random.default_rng(0).normal(0, 0.01, (1, 3000)).astype(np.float32)
    case = Case.of(SamplingParams(temperature=1.0, top_p=top_p), Draft(), logits)
    assert (in_graph([case]) == [None]) == is_left == needs_host(case)


def test_equal_distributions_accept_all_that_is_drawn() -> None:
    logits = np.random.default_rng(1).normal(0, 2, (4, 500)).astype(np.float32)
    for seed in range(50):
        params = SamplingParams(temperature=1.0, seed=seed)
        (found,) = in_graph([Case.of(params, drawn_chain(logits, params, 3, 2), logits)])
        assert found is not None
        assert found.verdict.num_accepted == 3


def test_a_proposal_without_a_token_in_common_is_rejected() -> None:
    logits = np.full((2, 8), -np.inf, dtype=np.float32)
    logits[:, :2] = 0.0
    other = Distribution(np.array([4, 6]), np.array([0.5, 0.5]))
    for seed in range(20):
        params = SamplingParams(temperature=1.0, seed=seed)
        (found,) = in_graph([Case.of(params, Draft.chain([6], [other]), logits)])
        assert found is not None
        assert found.verdict.num_accepted == 0
        assert found.verdict.token_ids[0] in (0, 1)


def test_the_graph_is_small_and_in_the_dialect_of_tensorrt() -> None:
    model = build_decide(151_936).model
    assert len(ir.to_proto(model).SerializeToString()) < 20_000
    assert lint(model) == []


@pytest.mark.parametrize("vocab_size", [70, 151_936])
def test_tensorrt_builds_it(vocab_size: int) -> None:
    try:
        library = find_library("tensorrt-rtx")
    except ConfigError:
        pytest.skip("plans need tensorrt-rtx: pip install 'specexport[rtx]'")
    model = build_decide(vocab_size).model
    profiles = make_profiles(_spec(model), Limits(8, 4096, 256, 8))
    options = PlanOptions(("sm86", "sm89", "sm120"), profiles)
    plan = build_plan(library, model, Path("target/decide.onnx"), options)
    assert plan.num_layers > 50


def _spec(model: ir.Model) -> DecideSpec:
    from specexport.export.parts import tensor_spec

    inputs, outputs = (
        tuple(map(tensor_spec, values)) for values in (model.graph.inputs, model.graph.outputs)
    )
    return DecideSpec(path="target/decide.onnx", inputs=inputs, outputs=outputs)
