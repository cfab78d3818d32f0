"""`specexport chat`."""

from pathlib import Path

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
from specexport.errors import RequestError
from specexport.runtime.options import EngineOptions
from specexport.runtime.params import SamplingParams
from specexport.runtime.tokenizer import Message

_HELP = "Commands: /stats the last turn's statistics, /new a new conversation, /bye (or Ctrl-D)."
_EXAMPLES = """\b
Examples:
  specexport chat smollm2
  specexport chat smollm2 --system "Answer in rhymes." -t 0.8
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.option("--system", help="A system message to begin with.")
@sampling_options
@engine_options
def command(
    bundle: Path,
    system: str | None,
    params: SamplingParams,
    options: EngineOptions,
) -> None:
    """Talk with BUNDLE over several turns, in the model's own chat template."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    table = None
    with open_engine(bundle, options) as engine:
        console.print(_HELP)
        while (line := _read_line()) is not None:
            if line == "/bye":
                break
            if line == "/new":
                messages = list(start)
            elif line == "/stats":
                console.print(table or "No turn yet.")
            elif line.startswith("/"):
                console.print(_HELP)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    ids = engine.tokenizer.encode_chat(messages)
                    stream = engine.submit(ids, fit_max_tokens(params, engine, len(ids)))
                except RequestError as error:
                    messages.pop()
                    console.print(f"{error} Use /new to begin again.", markup=False)
                    continue
                try:
                    for chunk in stream:
                        click.echo(chunk.text, nl=False)
                except KeyboardInterrupt:  # ends the answer, not the conversation
                    stream.cancel()
                click.echo()
                answer = stream.result()
                messages.append({"role": "assistant", "content": answer.text})
                values = stats_dict(
                    answer.stats,
                    len(ids),
                    len(answer.token_ids),
                    is_lossless=engine.stats().is_lossless,
                )
                table = stats_table(values)


def _read_line() -> str | None:
    """What the user typed; None at the end of input."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
