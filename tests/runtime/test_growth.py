"""Drafts grown from logits: chains, static trees, EAGLE-2's dynamic tree."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_softmax

from specexport.errors import ConfigError
from specexport.runtime.distribution import top_ids
from specexport.runtime.draft import Draft
from specexport.runtime.growth import DynamicTree, Grower, StaticTree
from specexport.runtime.params import SamplingParams
from specexport.runtime.picking import drawn
from specexport.runtime.token_map import TokenMap
from specexport.runtime.tree import ROOT, tree_shape

VOCAB_SIZE = 7
GREEDY = SamplingParams(seed=1)
FALSE_ALARM_RATE = 1e-5


def logits_after(path: Sequence[int]) -> Any:
    """The drafter's logits: a function of the drafted tokens so far."""
    seed = [17, *path]
    return np.random.default_rng(seed).normal(0, 2, VOCAB_SIZE).astype(np.float32)


def path_to(draft_tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, draft_tokens[node])
        node = parents[node]
    return path


def grow(
    grower: Grower,
    params: SamplingParams = GREEDY,
    depth: int = 99,
    token_map: TokenMap | None = None,
) -> Draft:
    growth = grower.start(drawn(params, token_map or TokenMap(VOCAB_SIZE)), 5, depth)
    num_computed = 0
    while growth.frontier:
        nodes = growth.nodes
        growth.grow(
            [logits_after(path_to(nodes.token_ids, nodes.parents, n)) for n in growth.frontier]
        )
        num_computed += len(growth.frontier)
    assert num_computed - 1 <= grower.max_nodes  # what a cache must have room for
    draft = growth.nodes.draft(growth.kept())
    assert len(draft) <= grower.max_nodes
    assert draft.depth <= min(depth, grower.depth)
    return draft


def test_a_greedy_chain_takes_the_likeliest_token_each_time() -> None:
    draft = grow(StaticTree.chain(4))
    path: list[int] = []
    for _ in range(4):
        path.append(int(logits_after(path).argmax()))
    assert draft == Draft.certain(path)


def test_a_greedy_static_tree_holds_the_tokens_of_its_ranks() -> None:
    tree = StaticTree([(0, 0), (0,), (2,), (2, 1), (0, 0, 3)])
    draft = grow(tree)
    by_path = {
        tuple(path_to(draft.token_ids, draft.parents, node)): node for node in range(len(draft))
    }
    for choice in tree.choices:
        path: list[int] = []
        for rank in choice:
            path.append(int(np.argsort(-logits_after(path), kind="stable")[rank]))
        assert tuple(path) in by_path
    assert len(by_path) == len(tree.choices)
    assert all(probs.is_one_hot for probs in draft.probs)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draft_is_cut_at_the_depth_that_is_asked_for(depth: int) -> None:
    for grower in (StaticTree([(0,), (1,), (0, 0), (0, 0, 0)]), DynamicTree(4, 2, 9)):
        assert grow(grower, depth=depth).depth == depth


def test_siblings_are_drawn_without_replacement_from_what_is_left() -> None:
    """χ² over ordered pairs of siblings below the text."""
    tree, counts = StaticTree([(0,), (1,)]), Counter[tuple[int, ...]]()
    num_samples = 8000
    for seed in range(num_samples):
        draft = grow(tree, SamplingParams(temperature=1.0, top_k=4, seed=seed))
        counts[draft.token_ids] += 1
        first, second = draft.probs
        assert second.prob(draft.token_ids[0]) == 0
        assert second.prob(draft.token_ids[1]) == pytest.approx(
            first.prob(draft.token_ids[1]) / (1 - first.prob(draft.token_ids[0]))
        )
    kept = top_ids(logits_after([]), 4)
    weights = np.exp(logits_after([])[kept].astype(np.float64))
    p = dict(zip(kept.tolist(), weights / weights.sum(), strict=True))
    expected = {(a, b): p[a] * p[b] / (1 - p[a]) for a in p for b in p if a != b}
    assert set(counts) <= set(expected)
    observed = [counts[pair] for pair in expected]
    result = stats.chisquare(observed, np.array(list(expected.values())) * num_samples)
    assert result.pvalue > FALSE_ALARM_RATE


def test_there_are_no_more_siblings_than_tokens_to_draw() -> None:
    wide = StaticTree([(i,) for i in range(5)] + [(4, 0)])
    draft = grow(wide, SamplingParams(temperature=1.0, top_k=2, seed=3))
    assert len(draft) == 2
    narrow = grow(StaticTree([(9,), (0,), (9, 0)]))  # there is no tenth token
    assert len(narrow) == 1


@given(
    depth=st.integers(1, 4), top_k=st.integers(1, 4), num_nodes=st.integers(1, 20), seed=st.just(0)
)
@settings(max_examples=60)
def test_a_dynamic_tree_keeps_the_likeliest_of_all_that_it_followed(
    depth: int, top_k: int, num_nodes: int, seed: int
) -> None:
    """Against the definition: beams of `top_k`, each with `top_k` children, best nodes of all."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depth):
        children = []
        for score, path in beams:
            log_probs = log_softmax(logits_after(path).astype(np.float64))
            best = np.argsort(-log_probs, kind="stable")[:top_k]
            children += [(score + float(log_probs[t]), (*path, int(t))) for t in best]
        candidates += children
        beams = sorted(children, reverse=True)[:top_k]
    expected = {path for _, path in sorted(candidates, reverse=True)[:num_nodes]}
    draft = grow(DynamicTree(depth, top_k, num_nodes))
    found = {tuple(path_to(draft.token_ids, draft.parents, node)) for node in range(len(draft))}
    assert found == expected


@pytest.mark.parametrize("spike", [20.0, 40.0, 100.0])
def test_a_dynamic_tree_of_a_sure_drafter_is_a_tree(spike: float) -> None:
    """A child may be as likely as its parent, to the last bit."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        growth = DynamicTree(4, 3, 7).start(drawn(GREEDY, TokenMap(VOCAB_SIZE)), 5, 4)
        while growth.frontier:
            logits = rng.normal(0, 1, (len(growth.frontier), VOCAB_SIZE)).astype(np.float32)
            logits[:, rng.integers(VOCAB_SIZE)] += spike
            growth.grow(list(logits))
        draft = growth.nodes.draft(growth.kept())
        assert len(draft) == 7
        assert all(parent < node for node, parent in enumerate(draft.parents))


def test_draft_ids_become_the_targets_before_anyone_sees_them() -> None:
    target_ids = np.array([30, 4, 21, 8, 15, 2, 11])
    token_map = TokenMap(VOCAB_SIZE, target_ids)
    draft = grow(StaticTree.chain(1), token_map=token_map)
    assert draft.token_ids == (target_ids[logits_after([]).argmax()],)
    params = SamplingParams(temperature=1.0, seed=0)
    mapped = token_map.distribution(logits_after([]), params)
    own = TokenMap(7).distribution(logits_after([]), params)
    assert mapped is not None
    assert own is not None
    assert mapped.token_ids.tolist() == sorted(target_ids.tolist())
    for draft_id, target_id in enumerate(target_ids.tolist()):
        assert mapped.prob(target_id) == own.prob(draft_id)


def test_ids_past_the_shared_ones_are_never_drafted() -> None:
    for grower in (StaticTree([(i,) for i in range(7)]), DynamicTree(2, 7, 30)):
        assert max(grow(grower, token_map=TokenMap(3)).token_ids) < 3


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "The tree has no path"),
        ([(i,) for i in range(1025)], "The tree has 1025 paths; at most 1024"),
        ([(0,), (0, 1, 0)], r"path \[0, 1, 0\] needs \[0, 1\], which is missing"),
        ([(1, 0)], r"path \[1, 0\] needs \[1\], which is missing"),
        ([(0,), (1,), (0,)], r"path \[0\] is there twice"),
        ([()], "The tree has an empty path"),
    ],
)
def test_paths_that_form_no_tree_are_refused(choices: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StaticTree(choices)


def test_the_shape_of_a_tree_follows_from_its_parents() -> None:
    shape = tree_shape((ROOT, ROOT, 0, 2, 1))
    assert shape.depths.tolist() == [0, 0, 1, 2, 1]
    assert shape.children == {ROOT: (0, 1), 0: (2,), 2: (3,), 1: (4,)}
    ancestors = [{0}, {1}, {0, 2}, {0, 2, 3}, {1, 4}]
    assert [set(np.flatnonzero(row)) for row in shape.sees] == ancestors
