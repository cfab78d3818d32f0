"""Loops on the hash engine: drafters of every kind, requests, and what must come out."""

from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

import numpy as np
from hypothesis import strategies as st

from specexport.engines.ort_decide import OrtDecider
from specexport.engines.step import Profile
from specexport.export.methods import Acceptance, LosslessAcceptance
from specexport.runtime.distribution import to_distribution
from specexport.runtime.draft import Draft
from specexport.runtime.drafters.base import Drafter, DraftRequest, NoDrafter
from specexport.runtime.drafters.first_of import FirstOf
from specexport.runtime.drafters.medusa import MedusaDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.growth import DynamicTree, Grower, StaticTree
from specexport.runtime.loop import Policy, SpeculativeLoop
from specexport.runtime.params import SamplingParams
from specexport.runtime.picking import MakePicker, drawn
from specexport.runtime.race import draw
from specexport.runtime.request import Request
from specexport.runtime.token_map import TokenMap
from tests.hash_engine import TEXTS, VOCAB_SIZE, HashEngine, HashHead, graph_spec, hash_logits

EOS = 0
_ids = count()


class Oracle(NoDrafter):
    """Knows the plain output and proposes it, with every `wrong_every`-th token off by one."""

    def __init__(self, salt: int = 0, wrong_every: int = 0, suffix: int | None = None) -> None:
        self._salt, self._wrong_every, self._suffix = salt, wrong_every, suffix

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft.certain(self._guess(w)) for w in wanted]

    def _guess(self, wanted: DraftRequest) -> list[int]:
        text = list(wanted.request.token_ids)
        guess = []
        for i in range(wanted.max_tokens):
            token_id = next_token(text, wanted.request.params, self._salt, self._suffix)
            if self._wrong_every and (i + 1) % self._wrong_every == 0:
                token_id = (token_id + 1) % VOCAB_SIZE
            guess.append(token_id)
            text.append(token_id)
        return guess


def next_token(
    text: list[int], params: SamplingParams, salt: int = 0, suffix: int | None = None
) -> int:
    visible = text if suffix is None else text[-suffix:]
    distribution = to_distribution(hash_logits(visible, salt), params)
    return draw(distribution, params.seed, len(text))


def plain_output(prompt: list[int], params: SamplingParams, max_tokens: int) -> list[int]:
    """Plain decoding, straight from the definition: no cache, no batch, no loop."""
    text = list(prompt)
    while len(text) - len(prompt) < max_tokens:
        text.append(next_token(text, params))
        if text[-1] == EOS and not params.ignore_eos:
            break
    return text[len(prompt) :]


def make_request(prompt: list[int], max_tokens: int, **params: Any) -> Request:
    return Request(
        id=next(_ids),
        params=SamplingParams(**params),
        max_tokens=max_tokens,
        num_prompt=len(prompt),
        token_ids=list(prompt),
    )


def make_loop(
    drafter: Drafter,
    k: int,
    eos_token_ids: Collection[int] = (),
    acceptance: Acceptance = LosslessAcceptance(),
    decider: OrtDecider | None = None,
) -> SpeculativeLoop:
    """A loop on the hash engine; trees may have more nodes than `k`."""
    target = HashEngine(has_taps=True, decider=decider)
    return SpeculativeLoop(target, drafter, k, eos_token_ids, Policy(8, acceptance))


def run(loop: SpeculativeLoop, requests: Sequence[Request]) -> dict[int, list[int]]:
    """Drive the loop to the end; the tokens reported for each request."""
    reported: dict[int, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        loop.submit(request)
    while loop.has_work:
        for new in loop.step():
            reported[new.request.id].extend(new.token_ids)
    return reported


TREES: dict[str, Grower] = {
    "chain": StaticTree.chain(4),
    "tree": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)]),
    "tree of depth 1": StaticTree([(0,), (1,), (2,), (3,)]),
    "dynamic tree": DynamicTree(depth=3, top_k=3, num_nodes=8),
}


def draft_model(
    salt: int = 0,
    max_length: int = 200,
    vocab_size: int = VOCAB_SIZE,
    tree: str = "chain",
    *,
    make_picker: MakePicker = drawn,
) -> Drafter:
    spec = graph_spec(vocab_size=vocab_size)
    profile = Profile(max_slots=4, max_length=max_length, max_query=16)
    runner = HashEngine(spec=spec, profile=profile, salt=salt)
    grower = StaticTree.chain(8) if tree == "chain" else TREES[tree]
    token_map = TokenMap(min(vocab_size, VOCAB_SIZE))
    return ModelDrafter(runner, grower, token_map, make_picker=make_picker)


def head(
    tree: str = "chain", salt: int = 0, max_length: int = 200, *, make_picker: MakePicker = drawn
) -> Drafter:
    """EAGLE or MTP, which differ in their graphs alone."""
    profile = Profile(max_slots=4, max_length=max_length, max_query=16)
    runner = HashHead(profile=profile, salt=salt)
    token_map = TokenMap(VOCAB_SIZE)
    return ModelDrafter(runner, TREES[tree], token_map, is_head=True, make_picker=make_picker)


class HashMedusa:
    """Heads that predict the target's greedy tokens from the text that a hidden state stands for.

    With `salt` they know them only now and then.
    """

    run_time_s = 0.0

    def __init__(self, salt: int = 0) -> None:
        self._salt = salt

    def run(self, hidden_states: Any) -> Any:
        return np.stack([self._heads(TEXTS.text(state[0])) for state in hidden_states])

    def _heads(self, text: list[int]) -> Any:
        text = [*text, int(hash_logits(text).argmax())]
        rows = []
        for _ in range(3):
            rows.append(hash_logits(text, self._salt))
            text.append(int(hash_logits(text).argmax()))
        return np.stack(rows)

    def close(self) -> None:
        pass


def medusa(tree: str = "tree", salt: int = 0) -> Drafter:
    shape = TREES[tree]
    assert isinstance(shape, StaticTree)
    return MedusaDrafter(HashMedusa(salt), shape)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "head, chain": lambda: head(salt=1),
    "head, tree": lambda: head("tree", salt=1),
    "head, tree of depth 1": lambda: head("tree of depth 1", salt=1),
    "head, dynamic tree": lambda: head("dynamic tree", salt=1),
    "head that is the target, tree": lambda: head("tree"),
    "head that is the target, dynamic tree": lambda: head("dynamic tree"),
    "medusa": lambda: medusa(salt=1),
    "medusa, right": medusa,
    "draft model, tree": lambda: draft_model(salt=1, tree="tree"),
    "the target as draft model, dynamic tree": lambda: draft_model(tree="dynamic tree"),
    "none": NoDrafter,
    "n-gram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(1, 2),
    "suffix with a store": lambda: SuffixDrafter(1, 4, store_tokens=60),
    "suffix, else always right": lambda: FirstOf(SuffixDrafter(2, 2), Oracle()),
    "always right": Oracle,
    "sometimes right": lambda: Oracle(wrong_every=3),
    "always wrong": lambda: Oracle(wrong_every=1),
    "the target as draft model": draft_model,
    "another draft model": lambda: draft_model(salt=1),
    "suffix, else a head": lambda: FirstOf(SuffixDrafter(2, 2), head("tree", salt=1)),
    "suffix, else a draft model": lambda: FirstOf(SuffixDrafter(2, 2), draft_model(salt=1)),
}
DETERMINISTIC = [
    "head, dynamic tree",
    "medusa",
    "the target as draft model, dynamic tree",
    "none",
    "n-gram",
    "suffix",
    "suffix with a store",
    "suffix, else always right",
    "always right",
    "sometimes right",
    "always wrong",
]

prompts = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), min_size=1, max_size=9
)
