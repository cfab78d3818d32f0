"""A head that knows what its target will say is never rejected.

Verification makes any draft lossless, so a head that reads the wrong hidden state, or a row too
early, shows in nothing but its acceptance. Here one rejection is a failure.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from specexport import Engine, EngineOptions, SamplingParams
from specexport.export.methods import DynamicTreeSpec, StaticTreeSpec
from specexport.runtime.stats import AcceptanceStats
from tests.cycle import ORDER, Source, follow
from tests.head_bundles import MAKERS, HeadBundle

Heads = Callable[[str, Source], HeadBundle]

# Whose drafts can be drawn from just the target's distribution: the whole vocabulary, all planes.
SAMPLING = (
    "eagle",
    "eagle3, ModelOpt, the target's output matrix",
    "mtp, deepseek_v3",
    "mtp, mimo",
)
HEADS: list[tuple[str, Source]] = [
    *((name, "hidden") for name in MAKERS),
    *((name, "embedding") for name in (*SAMPLING, "eagle3, SpecForge")),
]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    # Wide, and its longest path is the likeliest.
    "static tree": {
        "tree": StaticTreeSpec(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    },
    "dynamic tree": {"tree": DynamicTreeSpec(depth=3, top_k=2, num_nodes=6)},
}
CASES = [
    (name, source, shape)
    for name, source in HEADS
    for shape in SHAPES
    if shape != "dynamic tree" or not name.startswith("medusa")
]
CHUNK = 8
# One token, two, and more than a chunk; outputs stay in the reduced vocabulary of EAGLE-3 heads.
PROMPTS = (ORDER[3:4], ORDER[8:10], ORDER[9 : 9 + 3 * CHUNK + 1])
LENGTHS = (9, 12, 15)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return cache(lambda name, source: MAKERS[name](tmp_path_factory.mktemp("heads"), source, 0.0))


def run(
    head: HeadBundle, temperature: float, drafting: dict[str, Any]
) -> tuple[list[list[int]], AcceptanceStats]:
    """Outputs of prompts that join and leave."""
    options = EngineOptions(max_slots=2, step_tokens=CHUNK, num_threads=1, **drafting)
    with Engine(head.path, options) as engine:
        streams = []
        for seed, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=length, ignore_eos=True
            )
            streams.append(engine.submit(prompt, params))
        outputs = [list(stream.result().token_ids) for stream in streams]
        return outputs, engine.stats().acceptance


@pytest.mark.parametrize(("name", "source", "shape"), CASES)
def test_greedy_drafts_are_never_rejected(
    name: str, source: Source, shape: str, heads: Heads
) -> None:
    outputs, acceptance = run(heads(name, source), 0.0, SHAPES[shape])
    assert outputs == [follow(p[-1], n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    assert len(acceptance.proposed) == 3
    assert acceptance.accepted == acceptance.proposed


@pytest.mark.parametrize("shape", ["chain", "static tree"])
@pytest.mark.parametrize("name", SAMPLING)
def test_drafts_drawn_from_the_targets_own_distribution_are_never_rejected(
    name: str, shape: str, heads: Heads
) -> None:
    """Equal up to rounding, which rejects one draft in 10^4; the seeds are fixed.

    A rejection would leave a residual of nothing.
    """
    outputs, acceptance = run(heads(name, "embedding"), 1.0, SHAPES[shape])
    assert outputs != [follow(p[-1], n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    assert len(acceptance.proposed) == 3
    assert acceptance.accepted == acceptance.proposed
