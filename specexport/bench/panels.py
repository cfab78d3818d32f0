"""The panels of the figure; each draws all variants into one pair of axes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from specexport.bench.figures import Percentiles
from specexport.bench.results import LoadResult, Point, drafting_by_variant

DARK, GREY, LIGHT = "#222222", "#6A6A6A", "#E4E4E4"
_SECONDS_FROM_S = 5.0
"""Shorter times are shown in milliseconds."""
_MOST_TIMES = 25
"""What is larger by more than this is shown on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a variant looks in every panel."""

    colour: str
    marker: str
    offset: float
    """Its place beside the load's, where variants stand side by side."""


Styles = Mapping[str, Style]


def draw_speed(axes: Axes, results: Sequence[LoadResult], styles: Styles) -> None:
    """Tokens per second against the load."""
    _dress(
        axes,
        "Output tokens per second",
        "median; thin line: slowest to fastest round; number: fastest variant / off",
    )
    _mark_loads(axes, results)
    for i, style in enumerate(styles.values()):
        points = [result.points[i] for result in results]
        places = [place + _shift(style, results) for place in range(len(results))]
        _line(axes, places, [point.figures.tokens_per_s for point in points], style)
        for place, point in zip(places, points, strict=True):
            rates = [figures.tokens_per_s for figures in point.rounds]
            axes.vlines(place, min(rates), max(rates), color=style.colour, linewidth=1.2)
    for place, result in enumerate(results):
        best = max(result.points, key=lambda point: point.figures.tokens_per_s)
        if best is not result.points[0]:
            style = styles[best.variant]
            _note_speedup(axes, place + _shift(style, results), best, style)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])


def draw_acceptance(axes: Axes, results: Sequence[LoadResult], styles: Styles) -> None:
    """The part of proposed tokens that was accepted, by their position in the draft."""
    _dress(axes, "Acceptance per draft position", "accepted / proposed, all loads together")
    depth = 0
    for name, drafting in drafting_by_variant(results).items():
        if rates := drafting.acceptance.rate_per_position:
            depth = max(depth, len(rates))
            kept, drafted = drafting.acceptance.length - 1, drafting.mean_draft_length
            label = f"{name}: of {drafted:.1f} drafted tokens {kept:.1f} are accepted"
            _line(axes, range(1, len(rates) + 1), rates, styles[name], label)
    axes.set_ylim(0, 1.04)
    if not depth:
        axes.text(
            0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center", color=GREY
        )
        axes.set_xticks([])
        return
    axes.set_xlabel("position in the draft", color=DARK)
    axes.set_xticks(range(1, depth + 1))
    axes.set_xlim(0.6, depth + 0.4)
    axes.legend(frameon=False, fontsize=9.5, labelcolor=DARK)


def draw_percentiles(
    axes: Axes, results: Sequence[LoadResult], styles: Styles, name: str, title: str
) -> None:
    """Percentiles of the figure `name`, the variants side by side under each load."""
    values = {
        (place, point.variant): found
        for place, result in enumerate(results)
        for point in result.points
        if (found := getattr(point.figures, name)) is not None
    }
    factor, unit = _unit(values.values())
    _dress(axes, f"{title}, {unit}", "marker: median; thick line: to 90 %; thin line: to 99 %")
    _mark_loads(axes, results)
    for (place, variant), found in values.items():
        _range(axes, place + styles[variant].offset, found.scaled(factor), styles[variant])
    _scale(axes, values.values())


def _shift(style: Style, results: Sequence[LoadResult]) -> float:
    """Under several loads lines show the course; points under one stand side by side."""
    return style.offset if len(results) == 1 else 0.0


def _note_speedup(axes: Axes, place: float, point: Point, style: Style) -> None:
    """A variant's ratio to the first one, above it."""
    axes.annotate(
        f"{point.speedup:.2f}×",
        (place, max(figures.tokens_per_s for figures in point.rounds)),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        color=style.colour,
    )


def _line(
    axes: Axes, x: Sequence[float], y: Sequence[float], style: Style, label: str | None = None
) -> None:
    axes.plot(x, y, color=style.colour, marker=style.marker, markersize=7, linewidth=2, label=label)


def _range(axes: Axes, x: float, found: Percentiles, style: Style) -> None:
    """A median and what lies above it."""
    axes.vlines(x, found.p50, found.p99, color=style.colour, linewidth=1.5)
    axes.vlines(x, found.p50, found.p90, color=style.colour, linewidth=6, alpha=0.45)
    axes.plot(x, found.p50, color=style.colour, marker=style.marker, markersize=7)
    axes.plot(x, found.p99, color=style.colour, marker="_", markersize=8)


def _scale(axes: Axes, values: Collection[Percentiles]) -> None:
    """From 0 up, or by powers of ten where the smallest values would vanish."""
    lowest = min((found.p50 for found in values), default=1.0)
    highest = max((found.p99 for found in values), default=1.0)
    if highest > _MOST_TIMES * lowest:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, axes.get_ylim()[1])


def _unit(values: Collection[Percentiles]) -> tuple[float, str]:
    longest_s = max((found.p99 for found in values), default=0.0)
    return (1.0, "seconds") if longest_s >= _SECONDS_FROM_S else (1e3, "milliseconds")


def _mark_loads(axes: Axes, results: Sequence[LoadResult]) -> None:
    """A place for each load, all as far apart."""
    axes.set_xticks(range(len(results)), [f"{result.load.amount:g}" for result in results])
    axes.set_xlim(-0.5, len(results) - 0.5)
    axes.set_xlabel(results[0].load.axis, color=DARK)


def _dress(axes: Axes, title: str, explanation: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=DARK, pad=25)
    axes.text(0, 1.04, explanation, transform=axes.transAxes, fontsize=9, color=GREY)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.grid(axis="y", color=LIGHT)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=DARK)
