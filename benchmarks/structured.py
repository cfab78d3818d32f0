"""Structured output: what its masks cost, and what forced tokens and speculation save.

Prints, over a few extraction prompts, output tokens for each target step, and what following the
grammar costs in each step, beside what the target does. Both in time of the processor (all threads
for the target), which other load on the machine changes little.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common import header
from specexport.runtime.engine import Engine
from specexport.runtime.grammar import GrammarConstraint
from specexport.runtime.options import EngineOptions, MethodName
from specexport.runtime.params import SamplingParams
from specexport.runtime.structure import JsonSchema

_TEXT = {"type": "string", "maxLength": 60}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "Ada Lovelace, 36, a mathematician, lives in London with a cat named Byron.": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "profession": _TEXT,
        "city": {"enum": ["Paris", "London", "Rome", "unknown"]},
    },
    "Order 4711 of 2 May: three bottles of olive oil at 12 euros each, sent to Bergen.": {
        "order_number": {"type": "integer"},
        "product_name": _TEXT,
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "shipping_address": {
            "type": "object",
            "properties": {"city": _TEXT, "country_code": {"enum": ["NO", "SE", "DE", "FR"]}},
            "required": ["city", "country_code"],
            "additionalProperties": False,
        },
    },
    "The film was slow, badly lit and far too long, but the music was lovely.": {
        "overall_sentiment": {"enum": ["positive", "negative", "mixed"]},
        "mentioned_aspects": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "aspect_name": {"enum": ["plot", "pace", "light", "music", "acting"]},
                    "aspect_sentiment": {"enum": ["positive", "negative"]},
                },
                "required": ["aspect_name", "aspect_sentiment"],
                "additionalProperties": False,
            },
            "minItems": 3,
            "maxItems": 4,
        },
    },
    "Team meeting on Friday at ten in room 4 with Ines, Jonas and Mbali about the budget.": {
        "meeting_title": _TEXT,
        "day_of_week": {"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]},
        "participants": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 4},
        "is_recurring": {"type": "boolean"},
    },
}
_TIMED = ("allowed", "is_complete", "num_allowed", "forced", "commit")


class Clock:
    """Counts processor time inside the constraint; calls inside calls count once."""

    def __init__(self) -> None:
        self.time_s, self._depth = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def call(*arguments: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
            self._depth += 1
            started = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.time_s += time.thread_time() - started

        return call


@dataclass(slots=True)
class Sum:
    """Over all prompts; seconds of processor time, and of decoding by the clock."""

    num_tokens: int = 0
    num_steps: int = 0
    num_parsed: int = 0
    constraint_s: float = 0.0
    all_s: float = 0.0
    decode_s: float = 0.0


def measure(engine: Engine, clock: Clock, *, one_line: bool, is_forcing: bool) -> Sum:
    """All prompts, greedy, one after another."""
    found = Sum()
    for text, properties in _SCHEMAS.items():
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        params = SamplingParams(
            max_tokens=300,
            structure=JsonSchema(schema, one_line=one_line),
            # A token that never comes anyway: where an option has a say, nothing is forced.
            banned_token_ids=() if is_forcing else (engine.manifest.target.vocab_size - 1,),
        )
        message = {"role": "user", "content": f"Extract the facts as JSON: {text}"}
        ids = engine.tokenizer.encode_chat([message])
        clock.time_s = 0.0
        stream = engine.submit(ids, params)
        next(iter(stream))  # the prompt
        started = time.process_time()
        result = stream.result()
        found.all_s += time.process_time() - started
        found.num_tokens += len(result.token_ids)
        found.num_steps += result.stats.num_decode_steps + 1
        found.num_parsed += list(json.loads(result.text)) == list(properties)
        found.constraint_s += clock.time_s
        found.decode_s += result.stats.decode_time_s
    return found


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=Path("build/demo"))
@click.option("--rounds", default=2)
def main(bundle: Path, rounds: int) -> None:
    """Measure BUNDLE with n-gram drafts and without drafts, with forced tokens and without."""
    clock = Clock()
    for name in _TIMED:
        setattr(GrammarConstraint, name, clock.timed(getattr(GrammarConstraint, name)))
    table = Table(title=header("llguidance"), title_justify="left")
    for heading in (
        *("JSON", "drafts", "forced", "parsed", "tokens", "steps", "tokens/step", "decoding s"),
        *("constraint, CPU ms/step", "all, CPU ms/step"),
    ):
        table.add_column(heading)
    methods: tuple[MethodName, ...] = ("none", "ngram")
    for method in methods:
        with Engine(bundle, EngineOptions(max_slots=1, method=method, adaptive=False)) as engine:
            for one_line in (False, True):
                for is_forcing in (False, True):
                    runs = [
                        measure(engine, clock, one_line=one_line, is_forcing=is_forcing)
                        for _ in range(rounds)
                    ]
                    best = min(runs, key=lambda run: run.decode_s)
                    table.add_row(
                        "one line" if one_line else "any whitespace",
                        method,
                        "yes" if is_forcing else "no",
                        f"{best.num_parsed} of {len(_SCHEMAS)}",
                        str(best.num_tokens),
                        str(best.num_steps),
                        f"{best.num_tokens / best.num_steps:.2f}",
                        f"{best.decode_s:.2f}",
                        f"{1e3 * best.constraint_s / best.num_steps:.2f}",
                        f"{1e3 * best.all_s / best.num_steps:.1f}",
                    )
    Console(width=160, highlight=False).print(table)


if __name__ == "__main__":
    main()
