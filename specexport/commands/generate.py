"""`specexport generate`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from specexport.commands.common import (
    BUNDLE,
    console,
    engine_options,
    stats_dict,
    stats_table,
)
from specexport.commands.loading import open_engine
from specexport.commands.sampling import fit_max_tokens, sampling_options
from specexport.commands.structure import structure_options
from specexport.errors import ConfigError
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.options import EngineOptions
from specexport.runtime.output import Completion
from specexport.runtime.params import SamplingParams
from specexport.runtime.structure import Structure

_EXAMPLES = """\b
Examples:
  specexport generate smollm2 "The three laws of robotics are"
  specexport generate smollm2 --chat "Explain rainbows to a child." -t 0.7 --seed 1
  specexport generate smollm2 --file prompt.txt -n 500 -k 8
  specexport generate smollm2 "A poem:" -t 1 --min-p 0.05 --num-outputs 3 --stop "The end"
  specexport generate smollm2 --chat "Describe a cat." --json-schema cat.schema.json --one-line
  git diff | specexport generate coder --chat - --json
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.argument("prompt", required=False)
@click.option("--file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message.")
@sampling_options
@structure_options
@click.option("--ignore-eos", is_flag=True, help="Go on past the end of the answer.")
@click.option("--echo", is_flag=True, help="Begin with the prompt.")
@click.option("--num-outputs", type=int, default=1, help="Outputs wanted (n).")
@click.option("--best-of", type=int, help="Draw so many, keep the likeliest.")
@click.option(
    "--logprobs", type=int, help="With --json: log-probabilities, and those of so many likeliest."
)
@click.option("--prompt-logprobs", is_flag=True, help="With --json: those of the prompt too.")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, no stream.")
def command(
    bundle: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    params: SamplingParams,
    structure: Structure | None,
    ignore_eos: bool,
    echo: bool,
    num_outputs: int,
    best_of: int | None,
    logprobs: int | None,
    prompt_logprobs: bool,
    options: EngineOptions,
    as_json: bool,
) -> None:
    """Continue PROMPT (or a file, or `-` for standard input) with BUNDLE.

    The text goes to standard output, the statistics to standard error.
    """
    text = _read_prompt(prompt, file)
    if not as_json and (logprobs is not None or prompt_logprobs):
        raise ConfigError("Log-probabilities are printed as JSON only. Add --json.")
    params = replace(
        params,
        structure=structure,
        ignore_eos=ignore_eos,
        echo=echo,
        n=num_outputs,
        best_of=best_of,
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        prompt_logprobs=prompt_logprobs,
    )
    with open_engine(bundle, options) as engine:
        tokenizer = engine.tokenizer
        message = {"role": "user", "content": text}
        ids = tokenizer.encode_chat([message]) if chat else tokenizer.encode(text)
        group = engine.submit_many(ids, fit_max_tokens(params, engine, len(ids)))
        try:
            if not as_json and params.num_outputs == 1:
                for chunk in group.streams[0]:
                    click.echo(chunk.text, nl=False)
            completions = group.results()
        except KeyboardInterrupt:
            group.cancel()
            click.echo()
            console.print("Interrupted.")
            sys.exit(130)
        is_lossless = engine.stats().is_lossless
    outputs = [_as_dict(completion, len(ids), is_lossless) for completion in completions]
    if as_json:
        result = outputs[0] if params.n == 1 else {"outputs": outputs}
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    for number, output in enumerate(outputs, start=1):
        if params.num_outputs > 1:
            click.echo(f"--- output {number}\n{output['text']}", nl=False)
        click.echo()
        console.print(stats_table(output["stats"]))


def _as_dict(completion: Completion, num_prompt: int, is_lossless: bool) -> dict[str, Any]:
    """An output for a program to read."""
    values: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stopped_by": completion.stopped_by,
    }
    for name in ("logprobs", "prompt_logprobs"):
        found: Sequence[TokenLogprobs | None] | None = getattr(completion, name)
        if found is not None:
            values[name] = [one and asdict(one) for one in found]
    num_output = len(completion.token_ids)
    values["stats"] = stats_dict(completion.stats, num_prompt, num_output, is_lossless=is_lossless)
    return values


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError("Give one prompt: as an argument, with --file, or - for standard input.")
    try:
        if file is not None:
            return file.read_text()
        return sys.stdin.read() if prompt == "-" else prompt or ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompt cannot be read: {error}.") from None
