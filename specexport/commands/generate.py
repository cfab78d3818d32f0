"""`specexport generate`."""

import json
import sys
from pathlib import Path

import click

from specexport.commands.common import (
    BUNDLE,
    console,
    default_max_tokens,
    engine_options,
    make_params,
    sampling_options,
    stats_dict,
    stats_table,
)
from specexport.errors import ConfigError
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions

_EXAMPLES = """\b
Examples:
  specexport generate smollm2 "The three laws of robotics are"
  specexport generate smollm2 --chat "Explain rainbows to a child." -t 0.7 --seed 1
  specexport generate smollm2 --file prompt.txt -n 500 -k 8
  git diff | specexport generate coder --chat - --json
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.argument("prompt", required=False)
@click.option("--file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message.")
@sampling_options
@click.option("--ignore-eos", is_flag=True, help="Go on past the end of the answer.")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, no stream.")
def command(
    bundle: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    max_tokens: int | None,
    ignore_eos: bool,
    options: EngineOptions,
    as_json: bool,
) -> None:
    """Continue PROMPT (or a file, or `-` for standard input) with BUNDLE.

    The text goes to standard output, the statistics to standard error.
    """
    text = _read_prompt(prompt, file)
    make_params(temperature, top_k, top_p, seed, max_tokens)  # refuse before the bundle is loaded
    with Engine(bundle, options) as engine:
        tokenizer = engine.tokenizer
        message = {"role": "user", "content": text}
        ids = tokenizer.encode_chat([message]) if chat else tokenizer.encode(text)
        limit = max_tokens or default_max_tokens(engine, len(ids))
        params = make_params(temperature, top_k, top_p, seed, limit, ignore_eos=ignore_eos)
        stream = engine.submit(ids, params)
        try:
            for chunk in stream:
                if not as_json:
                    click.echo(chunk.text, nl=False)
        except KeyboardInterrupt:
            stream.cancel()
            click.echo()
            console.print("Interrupted.")
            sys.exit(130)
        completion = stream.result()
        values = stats_dict(
            completion.stats,
            len(ids),
            len(completion.token_ids),
            is_lossless=engine.stats().is_lossless,
        )
    if as_json:
        result = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stats": values,
        }
        click.echo(json.dumps(result, ensure_ascii=False))
    else:
        click.echo()
        console.print(stats_table(values))


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError("Give one prompt: as an argument, with --file, or - for standard input.")
    try:
        if file is not None:
            return file.read_text()
        return sys.stdin.read() if prompt == "-" else prompt or ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompt cannot be read: {error}.") from None
