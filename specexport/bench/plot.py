"""The report as a figure. Only this module and `panels` import matplotlib."""

import io
import shlex
import textwrap
from itertools import cycle, islice
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specexport.bench.panels import (
    DARK,
    GREY,
    Style,
    Styles,
    draw_acceptance,
    draw_percentiles,
    draw_speed,
)
from specexport.bench.report import Report

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_FIRST, _LAST = ("#555555", "o"), ("#D55E00", "D")
_BETWEEN = (
    ("#0072B2", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "v"),
    ("#E69F00", "P"),
    ("#56B4E9", "X"),
)
_DODGE = 0.42
"""What the variants under one load share of the distance to the next load."""


def draw(report: Report, file_format: str) -> bytes:
    """The figure as a file; `file_format` is png, svg or pdf."""
    buffer = io.BytesIO()
    make_figure(report).savefig(buffer, format=file_format)
    return buffer.getvalue()


def make_figure(report: Report) -> Figure:
    """Four panels: tokens per second, acceptance, time to first token, time between tokens."""
    figure = Figure(figsize=(12.5, 9.6), dpi=150, facecolor="white")
    panels = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.06, right=0.98, top=0.79, bottom=0.11, hspace=0.42, wspace=0.15)
    styles = _styles(report)
    draw_speed(panels[0, 0], report.results, styles)
    draw_acceptance(panels[0, 1], report.results, styles)
    draw_percentiles(panels[1, 0], report.results, styles, "first_token_s", "Time to first token")
    draw_percentiles(panels[1, 1], report.results, styles, "inter_token_s", "Time between tokens")
    _write_around(figure, report)
    _add_legend(figure, styles)
    return figure


def _styles(report: Report) -> dict[str, Style]:
    """A look for each variant, in their order; off and adaptive look the same in every figure."""
    names = [point.variant for point in report.results[0].points]
    looks = [_FIRST, *islice(cycle(_BETWEEN), len(names) - 2), _LAST]
    gap = _DODGE / (len(names) - 1)
    return {
        name: Style(*look, offset=gap * i - _DODGE / 2)
        for i, (name, look) in enumerate(zip(names, looks, strict=True))
    }


def _write_around(figure: Figure, report: Report) -> None:
    """What a figure needs beside it: model, machine, versions, command."""
    about = report.environment
    versions = ", ".join(f"{name} {number}" for name, number in about.versions.items())
    command = f"specexport {shlex.join(about.arguments)}"
    plain: dict[str, Any] = {"parse_math": False}
    small = plain | {"fontsize": 9, "color": GREY}
    title = textwrap.shorten(f"{about.model}, drafts by {about.method}", 90, placeholder=" …")
    figure.text(0.02, 0.955, title, fontsize=15, fontweight="bold", color=DARK, **plain)
    figure.text(0.02, 0.932, f"{about.machine}, {versions}; {about.time}", **small)
    figure.text(0.02, 0.912, report.workload, **small)
    footer = textwrap.shorten(command, 400, placeholder=" …")
    figure.text(0.02, 0.012, textwrap.fill(footer, 200), fontsize=8, color=GREY, **plain)


def _add_legend(figure: Figure, styles: Styles) -> None:
    """The variants, in one line under the title."""
    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, markersize=7, linewidth=2)
        for style in styles.values()
    ]
    figure.legend(
        handles,
        list(styles),
        loc="center left",
        bbox_to_anchor=(0.012, 0.882),
        ncols=len(styles),
        frameon=False,
        fontsize=11,
        labelcolor=DARK,
    )
