"""The report for a person who reads a terminal: tables of less than 80 columns."""

from collections.abc import Callable
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from specexport.bench.figures import Percentiles
from specexport.bench.report import Report
from specexport.bench.results import Point, drafting_by_variant


def tables(report: Report) -> list[Table]:
    """Speed, times, drafts."""
    return [_speed(report), _times(report), _drafts(report)]


def _speed(report: Report) -> Table:
    about = report.environment
    title = f"{escape(about.model)}, drafts by {about.method}\n{about.machine}\n{report.workload}"
    headings = ("tokens/s", "× off", "requests/s", "tokens/step", "output")
    table = _by_load(report, title, headings, _speed_cells)
    table.columns[-1].justify = "left"
    return table


def _speed_cells(point: Point) -> tuple[str, ...]:
    figures = point.figures
    return (
        f"{figures.tokens_per_s:.1f}",
        f"{point.speedup:.2f}",
        f"{figures.requests_per_s:.2f}",
        f"{point.drafting.tokens_per_step:.2f}",
        _verdict(point),
    )


def _verdict(point: Point) -> str:
    """What became of the output, compared with the first variant's."""
    if not point.is_lossless:
        return "LOSSY"
    if not point.num_compared:
        return "sampled"
    if point.num_different:
        return f"{point.num_different}/{point.num_compared} differ"
    return "identical"


def _times(report: Report) -> Table:
    headings = ("first token, ms", "between tokens, ms", "whole request, s")
    return _by_load(report, "p50/p90/p99, each the median of the rounds", headings, _time_cells)


def _time_cells(point: Point) -> tuple[str, ...]:
    figures = point.figures
    return (
        _percentiles(figures.first_token_s, 1e3),
        _percentiles(figures.inter_token_s, 1e3),
        _percentiles(figures.latency_s, 1),
    )


def _percentiles(found: Percentiles | None, scale: float) -> str:
    if found is None:
        return "–"
    shown = found.scaled(scale)
    return "/".join(_three_digits(value) for value in (shown.p50, shown.p90, shown.p99))


def _three_digits(value: float) -> str:
    """About so many that count: 0.12, 1.23, 12.3, 1234."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _drafts(report: Report) -> Table:
    """A row for each variant that drafted."""
    headings = ("drafts", "drafted", "accepted", "per position")
    table = _table("drafts under all loads together", ("variant",), headings)
    table.columns[-1].justify = "left"
    for variant, drafting in drafting_by_variant(report.results).items():
        acceptance = drafting.acceptance
        if acceptance.num_drafts:
            table.add_row(
                variant,
                str(acceptance.num_drafts),
                f"{drafting.mean_draft_length:.2f}",
                f"{acceptance.length - 1:.2f}",
                " ".join(f"{rate:.2f}" for rate in acceptance.rate_per_position),
            )
    return table


def _by_load(
    report: Report,
    title: str,
    headings: tuple[str, ...],
    cells: Callable[[Point], tuple[str, ...]],
) -> Table:
    """A row for each variant under each load."""
    axis = fill(report.results[0].load.axis, 10)
    table = _table(title, (axis, "variant"), headings)
    for result in report.results:
        for point in result.points:
            amount = f"{result.load.amount:g}" if point is result.points[0] else ""
            table.add_row(amount, point.variant, *cells(point))
        table.add_section()
    return table


def _table(title: str, names: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in names:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
