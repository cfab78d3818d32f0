"""Requests with logits and drafts, decided by the graph and by the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from specexport.engines.ort_decide import OrtDecider
from specexport.export.decide.graph import build_decide
from specexport.runtime.deciding import Decided, unpack
from specexport.runtime.distribution import Distribution, to_distribution
from specexport.runtime.draft import Draft
from specexport.runtime.packing import pack
from specexport.runtime.params import SamplingParams
from specexport.runtime.random import Purpose, uniform
from specexport.runtime.request import Request
from specexport.runtime.tree import ROOT
from specexport.runtime.turn import Turn
from specexport.runtime.verify import Verdict, verify
from tests.hash_engine import graph_spec

_ids = count()


@cache
def decider(vocab_size: int) -> OrtDecider:
    """The graph on one thread of ONNX Runtime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    data = ir.to_proto(build_decide(vocab_size).model).SerializeToString()
    return OrtDecider(ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]))


@dataclass(frozen=True)
class Case:
    """One request's part of a step."""

    turn: Turn
    logits: Any  # [1 + nodes, V]

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        draft: Draft,
        logits: Any,
        text: Sequence[int] = (1, 2),
        num_prompt: int = 1,
        end_ids: Sequence[int] = (),
    ) -> "Case":
        """`text` is the request's so far; its last token is computed in this step."""
        request = Request(
            id=next(_ids),
            params=params,
            max_tokens=99,
            num_prompt=num_prompt,
            token_ids=list(text[:num_prompt]),
        )
        request.admit(end_ids)
        request.processor.commit(text[num_prompt:])
        request.token_ids.extend(text[num_prompt:])
        request.num_computed = len(text) - 1
        return cls(Turn(request, 1, draft), np.asarray(logits, dtype=np.float32))

    def on_host(self) -> Verdict:
        """By NumPy."""
        request, draft = self.turn.request, self.turn.draft

        def target_at(node: int) -> Distribution:
            return request.processor.distribution(self.logits[node - ROOT], draft.path(node))

        return verify(draft, target_at, request.params.seed, len(request.token_ids))


def in_graph(cases: Sequence[Case]) -> list[Decided | None]:
    """All requests in one call; None where the graph leaves one to the host."""
    logits = np.concatenate([case.logits for case in cases])
    turns = [case.turn for case in cases]
    for slot, turn in enumerate(turns):
        turn.request.slot = slot
    vocab_size = logits.shape[1]
    decide = pack(turns, graph_spec(vocab_size=vocab_size, max_length=vocab_size))
    assert decide is not None
    output = decider(vocab_size).run(logits, decide)
    found = unpack(output, turns)
    return [found.get(slot) for slot in range(len(turns))]


def drawn_chain(logits: Any, params: SamplingParams, length: int, position: int) -> Draft:
    """Tokens that were drawn at random, each from a row of a drafter's logits."""
    probs = [to_distribution(row, params) for row in logits[:length]]
    chances = [uniform(params.seed, position + i, Purpose.DRAFT) for i in range(length)]
    return Draft.chain([p.sample(c) for p, c in zip(probs, chances, strict=True)], probs)


def certain_tree(token_ids: Sequence[int], parents: Sequence[int]) -> Draft:
    """Nothing was drawn at random."""
    probs = tuple(Distribution.one_hot(token_id) for token_id in token_ids)
    return Draft(tuple(token_ids), tuple(parents), probs)
