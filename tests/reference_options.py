"""What a request's options must give: transformers' own processors, and plain decoding with them.

The processors run in single precision, as on a model's logits; sampling in double precision.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from hypothesis import strategies as st

from specexport.runtime.distribution import Distribution
from specexport.runtime.params import SamplingParams
from specexport.runtime.race import draw


def reference_scores(
    logits: Any, params: SamplingParams, prompt: Sequence[int], text: Sequence[int], ends: Any = ()
) -> torch.Tensor:
    """Masked, biased and penalised logits [V] after `text`, which begins with `prompt`."""
    ids, scores = torch.tensor([list(text)]), torch.from_numpy(np.array(logits))[None]
    output = torch.tensor(list(text[len(prompt) :]), dtype=torch.long)
    if params.logit_bias:
        bias = {(token_id,): float(value) for token_id, value in params.logit_bias.items()}
        scores = transformers.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.repetition_penalty != 1:
        penalty = float(params.repetition_penalty)
        scores = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    counts = torch.bincount(output, minlength=scores.shape[1]).float()
    # OpenAI's formula, which transformers does not have.
    scores = scores - (params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    if params.min_tokens and ends:
        end_ids = sorted(ends)
        processor = transformers.MinNewTokensLengthLogitsProcessor
        scores = processor(len(prompt), params.min_tokens, end_ids)(ids, scores)
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        scores = transformers.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(ids, scores)
    if params.banned_token_ids:
        banned = list(params.banned_token_ids)
        scores = transformers.SuppressTokensLogitsProcessor(banned)(ids, scores)
    return scores[0]


def reference_probs(scores: torch.Tensor, params: SamplingParams) -> Any:
    """Probabilities [V] that the sampling options make of processed logits."""
    if params.temperature == 0:
        return np.eye(len(scores))[int(scores.argmax())]
    found, none = scores.double()[None], torch.zeros(1, 1, dtype=torch.long)
    warpers: list[tuple[Any, Callable[[], Any]]] = [
        (True, lambda: transformers.TemperatureLogitsWarper(float(params.temperature))),
        (params.top_k, lambda: transformers.TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: transformers.TopPLogitsWarper(params.top_p)),
        (params.min_p, lambda: transformers.MinPLogitsWarper(params.min_p)),
        (params.typical_p < 1, lambda: transformers.TypicalLogitsWarper(params.typical_p)),
    ]
    for wanted, warper in warpers:
        if wanted:
            found = warper()(none, found)
    return torch.softmax(found, dim=-1)[0].numpy()


def plain_decoding(
    logits_of: Callable[[list[int]], Any],
    prompt: Sequence[int],
    params: SamplingParams,
    max_tokens: int,
    eos: Collection[int] = (),
) -> list[int]:
    """The output by the definition: token by token, no cache, no batch, no drafts."""
    ends = {*(() if params.ignore_eos else eos), *params.stop_token_ids}
    text = list(prompt)
    while len(text) - len(prompt) < max_tokens:
        scores = reference_scores(logits_of(text), params, prompt, text, ends)
        probs = reference_probs(scores, params)
        ids = np.flatnonzero(probs)
        text.append(draw(Distribution(ids, probs[ids]), params.seed, len(text)))
        if text[-1] in ends:
            break
    return text[len(prompt) :]


@st.composite
def request_options(draw: Any, vocab_size: int, ends: Collection[int], *, greedy: bool) -> Any:
    """Any options that do not contradict each other."""
    ids = st.integers(0, vocab_size - 1)
    values = {
        "repetition_penalty": st.sampled_from([0.7, 1.2, 3.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.6, 4.0]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-3.0, 0.5, 8.0]), max_size=3),
        "banned_token_ids": st.lists(ids, max_size=3, unique=True),
        "allowed_token_ids": st.lists(ids, min_size=4, unique=True),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(ids, max_size=2),
    }
    if not greedy:
        values |= {
            "top_k": st.integers(0, vocab_size + 2),
            "top_p": st.sampled_from([0.3, 0.8, 0.97]),
            "min_p": st.sampled_from([0.02, 0.2, 0.9]),
            "typical_p": st.sampled_from([0.2, 0.7, 0.95]),
        }
    options: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=values))
    options["temperature"] = 0.0 if greedy else draw(st.sampled_from([0.4, 1.0, 1.8]))
    options["seed"] = draw(st.integers(0, 1000))
    banned = set(options.get("banned_token_ids", ()))
    left = set(options.get("allowed_token_ids", range(vocab_size))) - banned
    if "allowed_token_ids" in options:
        options["allowed_token_ids"] = sorted(left)
    if not left - {*ends, *options.get("stop_token_ids", ())}:
        options["min_tokens"] = 0
    bias = options.get("logit_bias", {})
    options["logit_bias"] = {
        token_id: value for token_id, value in bias.items() if token_id in left
    }
    return options
