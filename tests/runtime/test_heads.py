"""Bundles with a drafting head, whole: checkpoint → graphs → drafts → the target's own output.

The heads are right now and then, so that every step of verification has work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specexport import Engine, EngineOptions, SamplingParams
from specexport.export.methods import DynamicTreeSpec, StaticTreeSpec
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import DraftRequest
from specexport.runtime.tree import ROOT
from specexport.validation.distribution import compare_distribution
from tests.cycle import ORDER
from tests.head_bundles import MAKERS, HeadBundle
from tests.turnstile import loop_of

Bundles = Callable[[str], HeadBundle]
Params = Callable[[int], SamplingParams]

CHUNK = 16
PLAIN = {"method": "none"}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "static tree": {
        "tree": StaticTreeSpec(choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)))
    },
    "dynamic tree": {"tree": DynamicTreeSpec(depth=3, top_k=3, num_nodes=6)},
}
CASES = [
    (name, shape)
    for name in MAKERS
    for shape in SHAPES
    if shape != "dynamic tree" or not name.startswith("medusa")
]
# Their drafts are certain, so that they do not even change a seeded output.
CERTAIN = [case for case in CASES if case[0].startswith("medusa") or case[1] == "dynamic tree"]
PROMPTS = (
    ORDER[3:4],
    ORDER[20:22],
    ORDER[40 : 40 + 2 * CHUNK + 5],  # longer than a chunk
    [65, 66, 65, 66, 65],
    ORDER[5:6],
    ORDER[60 : 60 + CHUNK],
)
LENGTHS = (17, 9, 12, 18, 1, 8)  # requests join and leave at different steps


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    @cache
    def make(name: str) -> HeadBundle:
        noise = 0.45 if name.startswith("mtp") else 0.25
        return MAKERS[name](tmp_path_factory.mktemp("heads"), "hidden", noise)

    return make


def open_engine(bundle: HeadBundle, drafting: dict[str, Any], **options: Any) -> Engine:
    sizes = {"max_slots": 3, "step_tokens": CHUNK, "num_threads": 1, **options}
    return Engine(bundle.path, EngineOptions(verify_files=False, **sizes, **drafting))


def greedy(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTHS[i])


def sampled(i: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_p=0.95, seed=i, max_tokens=LENGTHS[i])


def alone(engine: Engine, params: Params) -> list[tuple[int, ...]]:
    return [engine.submit(p, params(i)).result().token_ids for i, p in enumerate(PROMPTS)]


def together(engine: Engine, params: Params) -> list[tuple[int, ...]]:
    streams = [engine.submit(p, params(i)) for i, p in enumerate(PROMPTS)]
    return [stream.result().token_ids for stream in streams]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_greedy_output_is_that_of_plain_decoding_alone_and_in_a_batch(
    name: str, shape: str, bundles: Bundles
) -> None:
    with open_engine(bundles(name), PLAIN) as plain:
        expected = alone(plain, greedy)
    with open_engine(bundles(name), SHAPES[shape]) as engine:
        assert together(engine, greedy) == expected
        assert alone(engine, greedy) == expected
        acceptance = engine.stats().acceptance
    assert 0 < sum(acceptance.accepted) < sum(acceptance.proposed)
    assert acceptance.accepted[1] > 0  # a path of two: entries were kept, and moved in trees


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_seeded_output_is_the_same_alone_and_in_a_batch(
    name: str, shape: str, bundles: Bundles
) -> None:
    with open_engine(bundles(name), SHAPES[shape]) as engine:
        outputs = together(engine, sampled)
        assert alone(engine, sampled) == outputs
    if (name, shape) in CERTAIN:
        with open_engine(bundles(name), PLAIN) as plain:
            assert alone(plain, sampled) == outputs


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3, SpecForge", "mtp, mimo"])
def test_a_tree_of_one_branch_drafts_what_a_chain_does(name: str, bundles: Bundles) -> None:
    branch = StaticTreeSpec(choices=((0,), (0, 0), (0, 0, 0)))
    for params in (greedy, sampled):
        found = []
        for drafting in (SHAPES["chain"], {"tree": branch}):
            with open_engine(bundles(name), drafting) as engine:
                found.append((together(engine, params), engine.stats().acceptance))
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3, SpecForge", "mtp, mimo"])
def test_a_tree_of_depth_1_changes_nothing(name: str, bundles: Bundles) -> None:
    with open_engine(bundles(name), PLAIN) as plain:
        expected = alone(plain, greedy)
    with open_engine(bundles(name), {"tree": StaticTreeSpec(choices=((0,), (1,)))}) as engine:
        assert together(engine, greedy) == expected
        acceptance = engine.stats().acceptance
    assert len(acceptance.proposed) == 1
    assert acceptance.num_nodes == 2 * acceptance.num_drafts
    assert acceptance.accepted[0] > 0


@dataclass
class Spy:
    """Keeps what a drafter proposes, with the text that it did it for."""

    propose: Callable[[Sequence[DraftRequest]], list[Draft]]
    seen: list[tuple[tuple[int, ...], Draft]] = field(default_factory=list)

    def __call__(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self.propose(wanted)
        texts = [tuple(item.request.token_ids) for item in wanted]
        self.seen += [(t, d) for t, d in zip(texts, drafts, strict=True) if d]
        return drafts


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_drafted_token_is_the_one_that_the_head_predicts_in_plain_torch(
    name: str, shape: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The j-th child of a node is the j-th likeliest token after the path that leads to it."""
    bundle = bundles(name)
    with open_engine(bundle, SHAPES[shape], max_slots=2) as engine:
        spy = Spy(loop_of(engine)._drafter.propose)
        monkeypatch.setattr(loop_of(engine)._drafter, "propose", spy)
        for i, n in ((0, 7), (2, 6), (3, 9)):
            engine.submit(PROMPTS[i], SamplingParams(max_tokens=n, ignore_eos=True))
        assert engine.drain()
    assert {len(text) > 2 * CHUNK for text, _ in spy.seen} == {True, False}
    for text, draft in spy.seen:
        paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        num_children: dict[int, int] = {}
        for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            rank = num_children[parent] = num_children.get(parent, -1) + 1
            logits = bundle.logits(text, paths[parent])
            assert token_id == int(logits.topk(rank + 1).indices[rank])
            paths[node] = (*paths[parent], token_id)


@dataclass(frozen=True)
class Exact:
    """The target in transformers: what `compare_distribution` asks of its reference."""

    model: Any

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            found = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return np.asarray(found.numpy())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("medusa", "static tree"),
        ("eagle", "chain"),
        ("eagle", "static tree"),
        ("eagle3, SpecForge", "static tree"),
        ("eagle3, SpecForge", "dynamic tree"),
        ("eagle3, ModelOpt, the target's output matrix", "chain"),
        ("mtp, deepseek_v3", "static tree"),
        ("mtp, mimo", "chain"),
    ],
)
def test_sampled_outputs_have_the_targets_distribution(
    name: str, shape: str, bundles: Bundles
) -> None:
    """χ² over outputs of four tokens; with the seeds fixed, the false-alarm rate is 1e-4."""
    bundle = bundles(name)
    with open_engine(bundle, SHAPES[shape], max_slots=8) as engine:
        reference = cast("Any", Exact(bundle.target))
        report = compare_distribution(reference, engine, ORDER[6:8], 400, length=4)
        acceptance = engine.stats().acceptance
    assert report.passed, report
    assert report.num_cells > 10
    assert len(acceptance.proposed) > 1
    assert 0 < sum(acceptance.accepted) < sum(acceptance.proposed)
