"""The log-probabilities that a request asks for, from the rows of logits of a step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.draft import Draft
from specexport.runtime.logprobs import TokenLogprobs, processed_logprobs, raw_logprobs
from specexport.runtime.lossy import LogitsAt
from specexport.runtime.request import Request
from specexport.runtime.tree import ROOT

MOST_PROMPT_ROWS = 64
"""A request whose prompt is scored takes so many rows of logits [V] in a step at the most."""


def kept_logprobs(
    request: Request,
    draft: Draft,
    path: Sequence[int],
    token_ids: Sequence[int],
    logits_at: LogitsAt,
) -> tuple[TokenLogprobs, ...]:
    """Of each kept token, by the row that it came from; none where they are not wanted."""
    params = request.params
    if not params.logprobs:
        return ()
    found = []
    for node, token_id in zip((ROOT, *path), token_ids, strict=False):
        logits = logits_at(node)
        if params.logprobs_of == "raw":
            found.append(raw_logprobs(logits, token_id, params.top_logprobs))
        else:
            above = draft.path(node)
            found.append(processed_logprobs(request.processor, logits, above, token_id))
    return tuple(found)


def num_scored(request: Request, num_tokens: int) -> int:
    """Of the next `num_tokens` of the text, those whose logits score the prompt; the last ones.

    The prompt's last token scores nothing, nor does what was scored before the request lost its
    slot.
    """
    if not request.params.prompt_logprobs:
        return 0
    first = max(request.num_computed, len(request.prompt_logprobs))
    last = min(request.num_computed + num_tokens, request.num_prompt - 1)
    return max(last - first, 0)


def score_prompt(request: Request, logits: NDArray[np.float32], num_tokens: int) -> int:
    """Keep the log-probabilities of the tokens after the next `num_tokens`; the rows used."""
    num_rows = num_scored(request, num_tokens)
    first = len(request.prompt_logprobs) + 1
    for row, token_id in zip(logits, request.token_ids[first : first + num_rows], strict=False):
        found = raw_logprobs(row, token_id, request.params.top_logprobs)
        request.prompt_logprobs.append(found)
    return num_rows
