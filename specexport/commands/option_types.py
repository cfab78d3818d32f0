"""Values of options that are more than a word: trees and rules of acceptance."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import click
from pydantic import BaseModel, ValidationError

from specexport.errors import SpecExportError
from specexport.export.methods import (
    DynamicTreeSpec,
    LosslessAcceptance,
    StaticTreeSpec,
    TopAcceptance,
    TypicalAcceptance,
)
from specexport.runtime.growth import check_choices


class TreeType(click.ParamType[Any]):
    """`dynamic[:DEPTH,TOP_K,NODES]`, or a list of paths as JSON or in a file."""

    name = "tree"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's own signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> StaticTreeSpec | DynamicTreeSpec:
        """Parse; fails with what was expected."""
        if isinstance(value, BaseModel):
            return value  # type: ignore[return-value]
        word, _, numbers = str(value).partition(":")
        try:
            if word == "dynamic":
                values = _numbers(numbers, "depth", "top_k", "num_nodes")
                return DynamicTreeSpec.model_validate(values)
            text = value if value.lstrip().startswith("[") else Path(value).read_text()
            tree = StaticTreeSpec(choices=json.loads(text))
            check_choices(tree.choices)
        except SpecExportError as error:
            self.fail(str(error), param, ctx)
        except (ValueError, TypeError, OSError, RecursionError) as error:
            self.fail(
                f"{value!r} is no tree ({_first_line(error)}). Give dynamic, "
                "dynamic:DEPTH,TOP_K,NODES, or paths such as [[0],[1],[0,0]], as JSON or a file.",
                param,
                ctx,
            )
        return tree


class AcceptanceType(click.ParamType[Any]):
    """`lossless`, `typical[:EPSILON,DELTA]` or `top[:N,DELTA]`."""

    name = "rule"
    _rules: ClassVar[dict[str, tuple[type[BaseModel], tuple[str, ...]]]] = {
        "lossless": (LosslessAcceptance, ()),
        "typical": (TypicalAcceptance, ("epsilon", "delta")),
        "top": (TopAcceptance, ("n", "delta")),
    }

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's own signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> LosslessAcceptance | TypicalAcceptance | TopAcceptance:
        """Parse; fails with what was expected."""
        if isinstance(value, BaseModel):
            return value  # type: ignore[return-value]
        word, _, numbers = str(value).partition(":")
        try:
            rule, names = self._rules[word]
            return rule.model_validate(_numbers(numbers, *names))  # type: ignore[return-value]
        except (KeyError, ValueError) as error:
            self.fail(
                f"{value!r} is no rule ({_first_line(error)}). Give lossless, "
                "typical[:EPSILON,DELTA] or top[:N,DELTA].",
                param,
                ctx,
            )


class SizeType(click.ParamType[Any]):
    """Bytes: a number, with KB, MB, GB or TB behind it or nothing."""

    name = "size"
    _units: ClassVar[dict[str, int]] = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's own signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        """Parse; fails with what was expected."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", str(value).strip().upper())
        unit = (found[2] or "").removesuffix("B") if found else None
        if found is None or unit is None or float(found[1]) == 0:
            self.fail(f"{value!r} is no size. Give one such as 500MB or 4GB.", param, ctx)
        return int(float(found[1]) * self._units[f"{unit}B" if unit else ""])


class ListType(click.ParamType[Any]):
    """Values of another type with commas between them, as an ascending tuple without repeats."""

    name = "list"

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's own signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[Any, ...]:
        """Parse each value; fails as its type fails."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        return tuple(sorted({self._item.convert(part.strip(), param, ctx) for part in parts}))


def _numbers(text: str, *names: str) -> dict[str, float]:
    """`a,b` as the first of the named numbers."""
    values = [float(part) for part in text.split(",")] if text else []
    if len(values) > len(names):
        raise ValueError(f"{len(values)} numbers, at most {len(names)}")
    return dict(zip(names, values, strict=False))


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
