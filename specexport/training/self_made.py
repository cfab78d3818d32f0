"""Prompts that the target writes itself: what it takes a user to say (Magpie, arXiv 2406.08464)."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from specexport.runtime.engine import Engine
from specexport.runtime.output import Completion
from specexport.runtime.params import SamplingParams
from specexport.runtime.random import choice_seed
from specexport.runtime.request import FinishReason
from specexport.training.lines import LineFile
from specexport.training.window import Asked, in_order

_TEMPERATURE, _TOP_P = 1.0, 0.95
_MAX_TOKENS = 128
_LEAST_WORDS = 4


def write_prompts(engine: Engine, path: Path, num_prompts: int, seed: int = 0) -> None:
    """Append prompts to the JSON lines at `path` until there are `num_prompts`.

    What is drawn with number i depends on (seed, i) alone, and a line has its number: whoever goes
    on after a kill gets the same file. Left out is what has no end, few words, or came before.
    Raises `RequestError` for a model without a chat template.
    """
    opening = engine.tokenizer.encode_user_opening()

    def requests(first: int) -> Iterator[Asked[int]]:
        for number in count(first):
            yield number, opening, _params(choice_seed(seed, number))

    with LineFile(path) as lines:
        entries = [json.loads(line) for line in lines.read()]
        seen = {_plain(entry["prompt"]) for entry in entries}
        if len(seen) >= num_prompts:
            return
        drawn = in_order(engine, requests(entries[-1]["number"] + 1 if entries else 0))
        for number, completion in drawn:
            if _is_prompt(completion, seen):
                text = completion.text.strip()
                seen.add(_plain(text))
                lines.append(json.dumps({"prompt": text, "number": number}, ensure_ascii=False))
            if len(seen) == num_prompts:
                drawn.close()
                return


def _params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P, max_tokens=_MAX_TOKENS, seed=seed)


def _is_prompt(completion: Completion, seen: set[str]) -> bool:
    """Whether it ends by itself, says something, is text, and is new."""
    text = completion.text.strip()
    return (
        completion.finish_reason is FinishReason.STOP
        and len(text.split()) >= _LEAST_WORDS
        and "\ufffd" not in text
        and _plain(text) not in seen
    )


def _plain(text: str) -> str:
    """What is the same for texts that differ in spaces and capitals alone."""
    return " ".join(text.lower().split())
