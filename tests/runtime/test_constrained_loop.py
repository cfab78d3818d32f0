"""Speculation under a constraint, on the hash engine: nothing may change the tokens.

The constraint is a rule of the test's own, so nothing here depends on a grammar engine.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from specexport.errors import EngineError
from specexport.export.methods import TopAcceptance
from specexport.runtime.constraint import Mask
from specexport.runtime.distribution import Distribution
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, NoDrafter
from specexport.runtime.drafters.constrained import Constrained, cut, draftable
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.growth import StaticTree
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.race import draw
from specexport.runtime.request import FinishReason, Request
from specexport.runtime.token_map import TokenMap
from tests.hash_engine import VOCAB_SIZE, HashEngine, graph_spec, hash_logits
from tests.loop_tools import (
    DETERMINISTIC,
    DRAFTERS,
    EOS,
    draft_model,
    head,
    make_loop,
    make_request,
    medusa,
    run,
)

Output = tuple[int, ...]
Rule = Callable[[Output], tuple[set[int], bool]]
"""Output so far → the tokens that may come next, `EOS` not among them, and whether it may end."""


class RuleConstraint:
    """A `Constraint` straight from a rule; it fails where the output is `fails_at` tokens long."""

    def __init__(self, rule: Rule, fails_at: int = -1) -> None:
        self._rule, self._fails_at = rule, fails_at
        self._output: Output = ()

    def _next(self, path: Sequence[int]) -> tuple[set[int], bool]:
        output: Output = ()
        allowed, can_end = self._rule(output)
        for token_id in (*self._output, *path):
            if token_id == EOS:
                assert can_end
                return set(), True
            if token_id not in allowed:
                raise EngineError(f"{token_id} may not follow {output}")
            output += (token_id,)
            allowed, can_end = self._rule(output)
        if len(output) == self._fails_at:
            raise EngineError("the rule gives up")
        return allowed, can_end

    def allowed(self, path: Sequence[int]) -> Mask:
        allowed, can_end = self._next(path)
        mask = np.zeros(VOCAB_SIZE, dtype=np.bool_)
        mask[[*allowed, *([EOS] if can_end else [])]] = True
        return mask

    def num_allowed(self, path: Sequence[int]) -> int:
        for count, token_id in enumerate(path):
            try:
                if EOS in path[:count] or not self.allowed(path[:count])[token_id]:
                    return count
            except EngineError:
                return count
        return len(path)

    def forced(self, path: Sequence[int], max_tokens: int) -> Output:
        tokens = tuple(path)
        while len(tokens) < len(path) + max_tokens:
            allowed, can_end = self._next(tokens)
            if can_end or len(allowed) != 1:
                break
            tokens += tuple(allowed)
        return tokens[len(path) :]

    def is_complete(self, path: Sequence[int]) -> bool:
        allowed, can_end = self._next(path)
        return can_end and not allowed

    def commit(self, token_ids: Sequence[int]) -> None:
        self._output += tuple(token_ids)


def hash_rule(salt: int) -> Rule:
    """Some tokens at each prefix, often one alone; some prefixes may end, some must."""

    def rule(output: Output) -> tuple[set[int], bool]:
        rng = np.random.default_rng(zlib.crc32(np.array([salt, *output], dtype=np.int64).tobytes()))
        if len(output) > 8 and rng.random() < 0.15:
            return set(), True
        count = int(rng.choice([1, 1, 2, 4, 7]))
        tokens = rng.choice(np.arange(1, VOCAB_SIZE), size=count, replace=False)
        return set(tokens.tolist()), bool(len(output) > 4 and rng.random() < 0.1)

    return rule


def masked_probs(text: Sequence[int], allowed: set[int], temperature: float = 1.0) -> Any:
    """[V], from the definition."""
    logits = hash_logits(list(text)).astype(np.float64)
    weights = np.zeros(VOCAB_SIZE)
    for token_id in allowed:
        weights[token_id] = np.exp(logits[token_id] / temperature)
    return weights / weights.sum()


def plain_output(
    prompt: list[int], rule: Rule, max_tokens: int, temperature: float = 0.0, seed: int = 0
) -> tuple[list[int], FinishReason]:
    """Plain decoding under a rule, straight from the definition."""
    output: Output = ()
    while len(output) < max_tokens:
        allowed, can_end = rule(output)
        if can_end and not allowed:
            return list(output), FinishReason.STOP
        options = sorted(allowed | ({EOS} if can_end else set()))
        text = [*prompt, *output]
        if temperature == 0:
            token_id = max(options, key=lambda i: hash_logits(text)[i])
        else:
            probs = masked_probs(text, set(options), temperature)[options]
            token_id = draw(Distribution(np.array(options), probs), seed, len(text))
        output += (token_id,)
        if token_id == EOS:
            return list(output), FinishReason.STOP
    allowed, can_end = rule(output)
    is_complete = can_end and not allowed
    return list(output), FinishReason.STOP if is_complete else FinishReason.LENGTH


def constrained(prompt: list[int], max_tokens: int, rule: Rule, **params: Any) -> Request:
    request = make_request(prompt, max_tokens, **params)
    request.constraint = RuleConstraint(rule)
    return request


CONSTRAINED: dict[str, Callable[[], Drafter]] = {
    **DRAFTERS,
    "n-gram, cut": lambda: Constrained(NgramDrafter(1, 3)),
    "medusa, cut": lambda: Constrained(medusa(salt=1)),
    "n-gram, cut, else a head": lambda: FirstOf(
        Constrained(NgramDrafter(1, 3)), head("tree", salt=1)
    ),
}
prompts = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20), min_size=1, max_size=6
)


@pytest.mark.parametrize("name", CONSTRAINED)
@given(prompts=prompts, k=st.integers(0, 8), max_tokens=st.integers(1, 30))
@settings(max_examples=8)
def test_greedy_output_is_the_definitions(
    name: str, prompts: list[list[int]], k: int, max_tokens: int
) -> None:
    """Every second request is constrained; each by a rule of its own."""
    loop = make_loop(CONSTRAINED[name](), k, [EOS])
    requests = [
        constrained(p, max_tokens, hash_rule(i)) if i % 2 == 0 else make_request(p, max_tokens)
        for i, p in enumerate(prompts)
    ]
    reported = run(loop, requests)
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert request.output_ids == reported[request.id]
        rule = hash_rule(i) if i % 2 == 0 else lambda _: (set(range(1, VOCAB_SIZE)), True)
        expected, reason = plain_output(prompt, rule, max_tokens)
        assert (request.output_ids, request.finish_reason) == (expected, reason)


@pytest.mark.parametrize("name", [*DETERMINISTIC, "n-gram, cut", "medusa, cut"])
@given(prompts=prompts, k=st.integers(0, 8))
@settings(max_examples=6)
def test_seeded_output_depends_on_neither_batch_nor_deterministic_drafts(
    name: str, prompts: list[list[int]], k: int
) -> None:
    loop = make_loop(CONSTRAINED[name](), k, [EOS])
    requests = [
        constrained(p, 25, hash_rule(i), temperature=0.9, seed=i) for i, p in enumerate(prompts)
    ]
    run(loop, requests)
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        expected, _ = plain_output(prompt, hash_rule(i), 25, temperature=0.9, seed=i)
        assert request.output_ids == expected


def tree_rule(output: Output) -> tuple[set[int], bool]:
    """Three tokens: one of four, then one of three (or the end), then one of two."""
    choices: list[set[int]] = [{1, 4, 6, 9}, {2, 4, 7}, {3, 11}, set()]
    if output and output[0] == 4:
        choices[1] = {5}  # forced
    return choices[len(output)], (len(output) in (1, 3) and output[0] != 4) or len(output) == 3


def exact_outputs(prompt: list[int]) -> dict[Output, float]:
    """Every output that `tree_rule` allows, with its probability under the masked target."""
    found: dict[Output, float] = {}
    paths: dict[Output, float] = {(): 1.0}
    while paths:
        longer: dict[Output, float] = {}
        for output, probability in paths.items():
            allowed, can_end = tree_rule(output)
            if can_end and not allowed:
                found[output] = probability
                continue
            probs = masked_probs([*prompt, *output], allowed | ({EOS} if can_end else set()))
            if can_end:
                found[(*output, EOS)] = probability * probs[EOS]
            longer |= {(*output, t): probability * probs[t] for t in allowed}
        paths = longer
    return found


SAMPLING: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "n-gram, cut": lambda: Constrained(NgramDrafter(1, 3)),
    "draft model": lambda: draft_model(salt=1),
    "draft model, tree": lambda: draft_model(salt=1, tree="tree"),
    "draft model, tree of depth 1": lambda: draft_model(salt=1, tree="tree of depth 1"),
    "dynamic tree": lambda: draft_model(salt=1, tree="dynamic tree"),
    "small draft vocabulary": lambda: draft_model(salt=1, vocab_size=8, tree="tree"),
    "head, tree": lambda: head("tree", salt=1),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_output_follows_the_masked_target(name: str) -> None:
    """χ² over all outputs, fixed seeds; a right sampler fails one in 10,000 other choices."""
    prompt, num_samples = [3, 5, 3], 800
    loop = make_loop(SAMPLING[name](), 3, [EOS])
    requests = [
        constrained(prompt, 9, tree_rule, temperature=1.0, seed=i) for i in range(num_samples)
    ]
    run(loop, requests)
    counts = Counter(tuple(r.output_ids) for r in requests)
    exact = exact_outputs(prompt)
    assert counts.keys() <= exact.keys()
    common = [o for o, p in exact.items() if p * num_samples >= 5]
    observed = [*(counts[o] for o in common), num_samples - sum(counts[o] for o in common)]
    rest = 1 - sum(exact[o] for o in common)
    expected = [*(exact[o] * num_samples for o in common), rest * num_samples]
    if rest * num_samples < 5:
        observed, expected = observed[:-1], expected[:-1]
        expected = [e * sum(observed) / sum(expected) for e in expected]
    assert len(expected) > 8
    assert chisquare(observed, expected).pvalue > 1e-4
    if name != "none":
        assert loop.stats().acceptance.num_drafts > 50
        assert loop.stats().acceptance.rate > 0


def test_a_sampling_drafter_that_is_the_target_is_never_rejected_under_a_constraint() -> None:
    """The drafter draws from its own masked distribution, which is then the target's."""
    for tree in ("chain", "tree"):
        loop = make_loop(draft_model(tree=tree), 4, [EOS])
        rules = [hash_rule(i) for i in range(9)]
        run(loop, [constrained([i, 3], 40, rules[i], temperature=1.0, seed=i) for i in range(9)])
        acceptance = loop.stats().acceptance
        assert acceptance.num_drafts > 20
        # A tree's first child may end the output where a sibling of it goes on.
        num_sure = 1 if tree == "tree" else 4
        assert acceptance.accepted[:num_sure] == acceptance.proposed[:num_sure]


def test_forced_tokens_take_no_step_of_their_own() -> None:
    """One of two, a run of six that is forced, one of two again, the end."""

    def rule(output: Output) -> tuple[set[int], bool]:
        if len(output) in (0, 7):
            return {1, 2}, False
        return ({3 + len(output) % 5} if len(output) < 7 else set()), len(output) == 8

    loop = make_loop(NoDrafter(), 0, [EOS])
    request = constrained([5], 30, rule)
    run(loop, [request])
    expected, _ = plain_output([5], rule, 30)
    assert request.output_ids == expected
    assert request.num_output == loop.stats().num_output_tokens == 8
    assert loop.stats().num_steps == 2


def test_a_forced_run_longer_than_a_step_is_read_in_chunks() -> None:
    def rule(output: Output) -> tuple[set[int], bool]:
        if len(output) < 60:
            return {1 + len(output) * 5 % 11}, False
        return {1, 2, 3, 4, 5}, len(output) == 70

    loop = make_loop(draft_model(), 4, [EOS])
    request, other = constrained([5], 65, rule), make_request([1, 2], 20)
    run(loop, [request, other])
    assert request.output_ids == plain_output([5], rule, 65)[0]
    assert other.output_ids == plain_output([1, 2], lambda _: (set(range(1, 12)), True), 20)[0]


@pytest.mark.parametrize("option", ["logprobs", "prompt_logprobs"])
def test_where_every_position_is_scored_forced_tokens_take_a_step_each(option: str) -> None:
    def rule(output: Output) -> tuple[set[int], bool]:
        return ({3}, False) if len(output) < 6 else (set(), True)

    loop = make_loop(NoDrafter(), 0, [EOS])
    request = constrained([5, 6], 30, rule, **{option: True})
    run(loop, [request])
    assert request.output_ids == [3] * 6
    assert loop.stats().num_steps == 6


def test_max_tokens_cuts_a_forced_run() -> None:
    for max_tokens in range(1, 9):
        loop = make_loop(NgramDrafter(1, 2), 3, [EOS])
        request = constrained([2], max_tokens, lambda output: ({3}, False))
        run(loop, [request])
        assert request.output_ids == [3] * max_tokens
        assert request.finish_reason is FinishReason.LENGTH


def test_a_constraint_that_gives_up_fails_its_request_alone() -> None:
    for drafter in (NoDrafter(), draft_model(), Constrained(NgramDrafter(1, 2))):
        loop = make_loop(drafter, 3, [EOS])
        bad, good = make_request([5], 20), constrained([4], 20, hash_rule(1))
        bad.constraint = RuleConstraint(lambda output: ({1, 2, 3}, False), fails_at=4)
        run(loop, [bad, good])
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.error == "the rule gives up"
        assert good.output_ids == plain_output([4], hash_rule(1), 20)[0]


def test_lossy_acceptance_keeps_to_the_constraint() -> None:
    class Anything(NoDrafter):
        """Drafts that no constraint has seen."""

        def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft.certain([7, 8, 7, 8][: w.max_tokens]) for w in wanted]

    rule = TopAcceptance(n=12, delta=1.0)  # passes whatever is not ruled out
    loop = SpeculativeLoop(HashEngine(), Anything(), 3, [EOS], Policy(acceptance=rule))
    requests = [constrained([i], 20, hash_rule(i)) for i in range(6)]
    run(loop, requests)
    for i, request in enumerate(requests):
        follower = RuleConstraint(hash_rule(i))
        assert follower.num_allowed(request.output_ids) == request.num_output
    assert sum(loop.stats().acceptance.accepted) > 0


def test_a_draft_is_cut_where_its_path_leaves_the_constraint() -> None:
    tree = Draft(
        token_ids=(1, 2, 9, 2, 3, 7, 11),
        parents=(-1, -1, -1, 0, 0, 2, 5),
        probs=tuple(Distribution.one_hot(t) for t in (1, 2, 9, 2, 3, 7, 11)),
    )
    kept = cut(tree, RuleConstraint(tree_rule))
    assert kept.token_ids == (1, 9, 2, 7, 11)
    assert kept.parents == (-1, -1, 0, 1, 3)
    assert [d.token_ids[0] for d in kept.probs] == [1, 9, 2, 7, 11]


def test_nothing_is_drafted_after_the_end_or_where_the_constraint_fails() -> None:
    follower = RuleConstraint(tree_rule)
    assert draftable(follower, (1, 2, 3)) is None
    assert draftable(follower, (1, EOS)) is None
    assert draftable(RuleConstraint(tree_rule, fails_at=1), (1,)) is None
    mask = draftable(follower, (1,))
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [EOS, 2, 4, 7]


def test_a_drafter_without_an_allowed_token_drafts_nothing() -> None:
    """The draft vocabulary has eight tokens; the rule allows others alone."""
    spec = graph_spec(vocab_size=8)
    for tree in (StaticTree.chain(3), StaticTree([(0,), (1,), (0, 0)])):
        for temperature in (0.0, 1.0):
            drafter = ModelDrafter(HashEngine(spec=spec), tree, TokenMap(8))
            loop = make_loop(drafter, 3, [EOS])
            request = constrained(
                [2], 12, lambda output: ({9, 10, 11}, False), temperature=temperature
            )
            run(loop, [request])
            assert request.num_output == 12
            assert loop.stats().acceptance.num_drafts == 0


def test_a_mask_reaches_the_drafters_own_ids() -> None:
    logits = np.arange(3, dtype=np.float32)
    allowed = np.array([False, True, False, True, False, True])
    through_map = TokenMap(3, np.array([1, 2, 5]))
    assert through_map.masked(logits, allowed).tolist() == [0.0, -np.inf, 2.0]
    assert TokenMap(2).masked(logits, allowed).tolist() == [-np.inf, 1.0]
    for first, second in product([False, True], repeat=2):
        scores = TokenMap(2).masked(logits, np.array([first, second]))
        assert len(TokenMap(2).top(scores, 2)) == first + second
