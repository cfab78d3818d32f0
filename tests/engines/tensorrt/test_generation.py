"""Whole generation with every kind of drafter on a fake GPU: token for token that of the CPU."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from specexport.export.engine_spec import Backend
from specexport.export.methods import DynamicTreeSpec, StaticTreeSpec
from tests.fake_gpu import FakeMachine
from tests.generating import assert_same, outputs
from tests.head_bundles import MAKERS
from tests.linked import linked

TREE = StaticTreeSpec(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
DRAFTING: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "n-gram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft model": {"num_speculative_tokens": 3},
    "draft model, lookup": {"lookup": "ngram", "num_speculative_tokens": 4},
    "draft model, static tree": {"tree": TREE},
    "draft model, dynamic tree": {"tree": DynamicTreeSpec(depth=3, top_k=2, num_nodes=6)},
    "adaptive draft model": {"adaptive": True},
}
HEADS = (
    "medusa",
    "medusa, reduced vocabulary",
    "eagle",
    "eagle3, SpecForge",
    "eagle3, ModelOpt, latent attention",
    "mtp, deepseek_v3",
)
SIZES: dict[str, Any] = {"max_slots": 3, "step_tokens": 16}


@pytest.fixture(params=get_args(Backend))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine.install(monkeypatch, request.param)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: MAKERS[name](tmp_path_factory.mktemp("heads"), "hidden", 0.25).path)


@pytest.mark.parametrize("drafting", DRAFTING)
def test_drafts_of_models_and_lookups(
    machine: FakeMachine, draft_bundle: Path, tmp_path: Path, drafting: str
) -> None:
    bundle = linked(draft_bundle, tmp_path / "bundle")
    machine.add_plans(bundle, max_slots=3, chunk=32)
    options = {**SIZES, **DRAFTING[drafting]}
    expected = outputs(bundle, "onnxruntime", **options)
    assert_same(outputs(bundle, machine.backend, **options), expected, 1e-4)
    assert _have_run(machine)["target"]
    if "tree" not in DRAFTING[drafting]:  # a tree that is drawn at random is for the host
        assert _have_run(machine)["decide"]
    machine.assert_all_freed()


@pytest.mark.parametrize("machine", ["tensorrt"], indirect=True)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_of_heads(
    machine: FakeMachine, heads: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    bundle = linked(heads(name), tmp_path / "bundle")
    machine.add_plans(bundle, max_slots=3, chunk=32)
    options = {**SIZES, "tree": TREE}
    expected = outputs(bundle, "onnxruntime", **options)
    assert_same(outputs(bundle, machine.backend, **options), expected, 1e-4)
    assert all(has_run for name, has_run in _have_run(machine).items() if name != "decide")
    machine.assert_all_freed()


def _have_run(machine: FakeMachine) -> dict[str, bool]:
    """Each plan's engine; the target's is loaded first."""
    found = {}
    for number, engine in enumerate(machine.library.engines):
        name = "decide" if "is_decided" in engine.outputs else str(number or "target")
        found[name] = any(context.num_runs for context in engine.contexts)
    return found
