"""Loops for many requests on the hash engine, and what must hold of them at any moment."""

from specexport.engines.step import Profile
from specexport.runtime.drafters.base import Drafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.request import Request
from tests.hash_engine import HashEngine
from tests.loop_tools import DRAFTERS, EOS, make_request, run

NUM_SLOTS = 3
POLICIES = {
    "no prefix cache": Policy(8),
    "small prefix cache": Policy(8, max_prefix_bytes=3000),
    "prefix cache": Policy(8, max_prefix_bytes=2**20),
}


def storm_loop(drafter: Drafter, policy: Policy, k: int = 3) -> SpeculativeLoop:
    profile = Profile(max_slots=NUM_SLOTS, max_length=200, max_query=40)
    return SpeculativeLoop(HashEngine(profile=profile, has_taps=True), drafter, k, [EOS], policy)


def alone(name: str, request: Request) -> list[int]:
    """The same request on a loop of its own, without a prefix cache."""
    loop = storm_loop(DRAFTERS[name](), POLICIES["no prefix cache"])
    twin = make_request(request.token_ids[: request.num_prompt], request.max_tokens)
    twin.params = request.params
    run(loop, [twin])
    return twin.output_ids


def check_forgotten(loop: SpeculativeLoop) -> None:
    """Nothing is left of any request."""
    assert not loop._slots._num_kept
    assert not loop._slots._first_own
    assert not loop._deadlines
    left: list[object] = [loop._drafter]
    while left:
        drafter = left.pop()
        left += [part for name in _PARTS if (part := getattr(drafter, name, None)) is not None]
        for name in _OF_REQUESTS:
            assert not getattr(drafter, name, None), f"{type(drafter).__name__}.{name}"


_PARTS = ("_lookup", "_fallback", "_drafter")
_OF_REQUESTS = ("_states", "_texts", "_indexes", "_last")  # of drafters, by a request's id


def check_caches(loop: SpeculativeLoop) -> None:
    """Every slot holds the tokens that count as computed, in the drafter's cache too."""
    target = loop._target
    assert isinstance(target, HashEngine)
    for request in loop._scheduler.running:
        row = target.cache[request.slot, : request.num_computed]
        assert row.tolist() == request.token_ids[: request.num_computed]
    model = getattr(loop._drafter, "_fallback", loop._drafter)
    if not isinstance(model, ModelDrafter):
        return
    assert isinstance(model._runner, HashEngine)
    for request in loop._scheduler.running:
        if state := model._states.get(request.id):
            row = model._runner.cache[request.slot, : state.num_computed]
            text = request.token_ids[model._shift :]
            assert row.tolist() == text[: state.num_computed]
