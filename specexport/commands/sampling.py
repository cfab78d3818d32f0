"""Options that become `SamplingParams`."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import click

from specexport.runtime.engine import Engine
from specexport.runtime.params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_MAX_TOKENS = 256


class BiasType(click.ParamType[Any]):
    """`ID=VALUE`: a token id and what is added to its logit."""

    name = "id=value"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's own signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[int, float]:
        """Parse; fails with what was expected."""
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is no bias. Give a token id and a number: 42=-1.5.", param, ctx)


# The parameter, its option and what click needs to know of it.
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("temperature", "-t/--temperature", {"type": float, "help": "0 is greedy  [default: 0]."}),
    ("top_k", "--top-k", {"type": int, "help": "Likeliest tokens kept; 0 keeps all."}),
    ("top_p", "--top-p", {"type": float, "help": "Nucleus; 1 keeps all."}),
    ("min_p", "--min-p", {"type": float, "help": "Least part of the likeliest's probability."}),
    ("typical_p", "--typical-p", {"type": float, "help": "Locally typical tokens; 1 keeps all."}),
    (
        "repetition_penalty",
        "--repetition-penalty",
        {"type": float, "help": "Above 1 weakens tokens of prompt and output."},
    ),
    (
        "frequency_penalty",
        "--frequency-penalty",
        {"type": float, "help": "Taken from a token's logit for each time in the output."},
    ),
    (
        "presence_penalty",
        "--presence-penalty",
        {"type": float, "help": "Taken once from the logits of the output's tokens."},
    ),
    (
        "logit_bias",
        "--logit-bias",
        {"type": BiasType(), "multiple": True, "help": "Added to a token's logit; repeatable."},
    ),
    (
        "banned_token_ids",
        "--ban-token-id",
        {"type": int, "multiple": True, "help": "Never comes; repeatable."},
    ),
    ("min_tokens", "--min-tokens", {"type": int, "help": "Output tokens at the least."}),
    (
        "max_tokens",
        "-n/--max-tokens",
        {
            "type": int,
            "help": f"Output tokens at the most  [default: {DEFAULT_MAX_TOKENS}, or what fits].",
        },
    ),
    ("stop", "--stop", {"multiple": True, "help": "A text that ends the output; repeatable."}),
    ("include_stop", "--include-stop", {"is_flag": True, "help": "Leave it in the text."}),
    ("seed", "--seed", {"type": int, "help": "Makes sampled output repeatable."}),
)


def sampling_options(function: F) -> F:
    """Options of every command that generates, collected into the one parameter `params`."""
    for name, flags, details in reversed(_OPTIONS):
        function = click.option(*flags.split("/"), name, **details)(function)

    @wraps(function)
    def command(**values: Any) -> Any:  # noqa: ANN401 - whatever the command returns
        chosen = {name: values.pop(name) for name, _, _ in _OPTIONS}
        return function(params=_params(chosen), **values)

    return command  # type: ignore[return-value]


def _params(chosen: dict[str, Any]) -> SamplingParams:
    """What was not given keeps the default of `SamplingParams`."""
    given = {name: value for name, value in chosen.items() if value not in (None, ())}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**{"seed": secrets.randbits(63), **given})


def fit_max_tokens(params: SamplingParams, engine: Engine, num_prompt: int) -> SamplingParams:
    """What `--max-tokens` is when it is not given."""
    room = engine.max_length - num_prompt
    if params.max_tokens is not None or room < max(params.min_tokens, 1):
        return params  # the engine says what does not fit
    limit = min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room)
    return replace(params, max_tokens=limit)
