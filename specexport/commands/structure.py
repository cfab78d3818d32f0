"""Options that say what the whole output must look like."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from specexport.errors import ConfigError
from specexport.runtime.structure import Choice, Grammar, JsonSchema, Regex, Structure

F = TypeVar("F", bound=Callable[..., Any])


def structure_options(function: F) -> F:
    """Options of which one may be given, collected into the one parameter `structure`."""
    for option in (
        click.option("--choice", multiple=True, help="Write one of these texts; repeatable."),
        click.option("--grammar", help="Write what this file's grammar (Lark or GBNF) describes."),
        click.option("--regex", help="Write what this regular expression matches as a whole."),
        click.option("--one-line", is_flag=True, help="The JSON on one line: faster."),
        click.option("--json-schema", help="Write JSON of this schema (a file, or the schema)."),
    ):
        function = option(function)

    @wraps(function)
    def command(**values: Any) -> Any:  # noqa: ANN401 - whatever the command returns
        names = ("json_schema", "one_line", "regex", "grammar", "choice")
        chosen = {name: values.pop(name) for name in names}
        return function(structure=_structure(**chosen), **values)

    return command  # type: ignore[return-value]


def _structure(
    json_schema: str | None,
    one_line: bool,
    regex: str | None,
    grammar: str | None,
    choice: tuple[str, ...],
) -> Structure | None:
    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    names += ["--choice"] if choice else []
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} were given; the output can follow one of them.")
    if one_line and json_schema is None:
        raise ConfigError("--one-line says how JSON is written. Give --json-schema too.")
    if json_schema is not None:
        is_text = json_schema.lstrip().startswith("{")
        return JsonSchema(json_schema if is_text else _read(json_schema), one_line=one_line)
    if regex is not None:
        return Regex(regex)
    if grammar is not None:
        return Grammar(_read(grammar))
    return Choice(choice) if choice else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
