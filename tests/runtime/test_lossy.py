"""Lossy acceptance, which nobody gets without asking."""

from typing import Any

import numpy as np
import pytest

from specexport.export.methods import LosslessAcceptance, TopAcceptance, TypicalAcceptance
from specexport.runtime.draft import Draft
from specexport.runtime.lossy import verify_lossy
from specexport.runtime.params import SamplingParams
from specexport.runtime.processing import LogitsProcessor
from specexport.runtime.tree import ROOT
from tests.loop_tools import EOS, head, make_loop, make_request, plain_output, run

SHARP = np.log(np.array([0.9, 0.05, 0.03, 0.02], dtype=np.float32))
FLAT = np.log(np.array([0.28, 0.26, 0.24, 0.22], dtype=np.float32))
SAMPLED = SamplingParams(temperature=1.0, seed=0)


def accepted(rule: Any, draft: Draft, logits: Any, params: SamplingParams = SAMPLED) -> Any:
    processor = LogitsProcessor(params, [])
    return verify_lossy(rule, draft, lambda node: logits[node + 1], processor, 0).path


def test_typical_acceptance_keeps_what_the_threshold_lets_pass() -> None:
    """threshold = min(epsilon, delta * exp(-entropy)); entropy 0.43 → 0.195, 1.38 → 0.076."""
    rule = TypicalAcceptance(epsilon=0.5, delta=0.3)
    for logits, threshold in ((SHARP, 0.195), (FLAT, 0.0755)):
        for token_id in range(4):
            path = accepted(rule, Draft.certain([token_id]), [logits, logits])
            assert (path == (0,)) == (np.exp(logits[token_id]) > threshold)
    assert accepted(TypicalAcceptance(epsilon=0.04, delta=9), Draft.certain([1]), [SHARP] * 2)


def test_typical_acceptance_of_a_greedy_request_keeps_the_best_token_alone() -> None:
    greedy = SamplingParams(seed=0)
    rule = TypicalAcceptance()
    assert accepted(rule, Draft.certain([0]), [FLAT, FLAT], greedy) == (0,)
    assert accepted(rule, Draft.certain([1]), [FLAT, FLAT], greedy) == ()


def test_top_acceptance_wants_a_rank_and_a_probability_near_the_best() -> None:
    def passes(n: int, delta: float, token_id: int, logits: Any) -> bool:
        rule = TopAcceptance(n=n, delta=delta)
        return bool(accepted(rule, Draft.certain([token_id]), [logits, logits]))

    assert passes(2, 1.0, 1, SHARP)
    assert not passes(2, 1.0, 2, SHARP)  # the third
    assert not passes(2, 0.5, 1, SHARP)  # 0.85 below the best
    assert passes(4, 0.1, 3, FLAT)


def test_the_longest_passing_path_of_a_tree_is_taken() -> None:
    parents = (ROOT, ROOT, 1, 0, 2)
    draft = Draft((0, 1, 0, 3, 0), parents, Draft.certain([0, 1, 0, 3, 0]).probs)
    path = accepted(TopAcceptance(n=2, delta=1.0), draft, [FLAT] * 6)
    assert path == (1, 2, 4)  # node 3, the fourth choice, does not pass


def test_statistics_say_whether_a_rule_was_lossy() -> None:
    for rule, is_lossless in ((LosslessAcceptance(), True), (TopAcceptance(), False)):
        loop = make_loop(head(salt=1), 4, [EOS], rule)
        run(loop, [make_request([1, 2], 10)])
        assert loop.stats().is_lossless is is_lossless


def test_a_lossy_rule_accepts_more_and_changes_the_output() -> None:
    prompts = [[i, 5, i] for i in range(4)]
    found = {}
    for rule in (LosslessAcceptance(), TopAcceptance(n=4, delta=1.0)):
        loop = make_loop(head(salt=1), 4, acceptance=rule)
        requests = [make_request(prompt, 40) for prompt in prompts]
        run(loop, requests)
        found[rule.kind] = (loop.stats().acceptance.rate, [r.output_ids for r in requests])
    plain = [plain_output(p, SamplingParams(ignore_eos=True), 40) for p in prompts]
    assert found["lossless"][1] == plain
    assert found["top"][1] != plain
    assert found["top"][0] > found["lossless"][0]


@pytest.mark.parametrize("rule", [{"epsilon": 0}, {"epsilon": 1.5}, {"delta": 0}])
def test_a_threshold_outside_its_range_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"greater than 0|less than or equal to 1"):
        TypicalAcceptance.model_validate(rule)
