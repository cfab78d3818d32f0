"""What a benchmark shows: JSON, tables, the figure."""

import json
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

from specexport.bench.figures import Drafting, Percentiles
from specexport.bench.load import PoissonArrivals
from specexport.bench.plot import draw, make_figure
from specexport.bench.report import Report
from specexport.bench.results import LoadResult, Point
from specexport.bench.table import tables
from tests.bench.reports import make_report


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report()


def changed(report: Report, **values: object) -> Report:
    """Every point with other values."""
    points = [
        [replace(point, **values) for point in result.points]  # type: ignore[arg-type]
        for result in report.results
    ]
    results = [
        LoadResult(result.load, tuple(own))
        for result, own in zip(report.results, points, strict=True)
    ]
    return replace(report, results=tuple(results))


def shown(report: Report) -> str:
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(*tables(report))
    return capture.get()


def values(line: Line2D) -> list[float]:
    """Of a line's points."""
    return [float(value) for value in np.asarray(line.get_ydata())]


def texts(figure: Figure) -> str:
    found = [text.get_text() for text in figure.texts]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel()]
        found += [text.get_text() for text in axes.texts]
        found += [label.get_text() for label in axes.get_xticklabels()]
        if legend := axes.get_legend():
            found += [text.get_text() for text in legend.get_texts()]
    return "\n".join(found)


def test_json_has_all_figures_and_what_they_need_beside_them(report: Report) -> None:
    found = json.loads(json.dumps(report.as_dict()))
    assert found["machine"] == "a machine, 2 threads"
    assert found["arguments"][-1] == "a $file$.txt"
    assert found["mean_prompt_tokens"] == 123.4
    assert found["settings"]["prompts"] == "shipped with specexport"
    load = found["loads"][1]
    assert (load["kind"], load["num_clients"]) == ("closed-loop", 2)
    fixed = load["variants"][1]
    # From 2 to 7.5 s: one client two requests, the other the rest of its warm-up and two more.
    assert fixed["tokens_per_s"] == pytest.approx((14 + 2 + 14) / 5.5)
    assert fixed["first_token_s"] == {"p50": 1, "p90": 1, "p99": 1}
    assert fixed["inter_token_s"] == {"p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert fixed["speedup"] == pytest.approx((30 / 5.5) / (33 / 9.5))
    assert (fixed["greedy_requests_compared"], fixed["greedy_requests_different"]) == (4, 1)
    assert fixed["drafting"]["acceptance_rate_per_position"] == [1, 0, 0, 0]
    assert fixed["drafting"]["mean_draft_length"] == 4
    assert [one["tokens_per_s"] for one in fixed["rounds"]] == pytest.approx([30 / 5.5] * 3)


def test_json_names_the_arrivals(report: Report) -> None:
    results = [replace(result, load=PoissonArrivals(0.5, 4, seed=9)) for result in report.results]
    load = replace(report, results=tuple(results)).as_dict()["loads"][0]
    found = {name: load[name] for name in ("kind", "rate_per_s", "num_slots", "seed")}
    assert found == {"kind": "poisson", "rate_per_s": 0.5, "num_slots": 4, "seed": 9}


def test_tables_fit_into_80_columns_and_show_every_variant(report: Report) -> None:
    text = shown(report)
    assert "Tiny [llama], fp32, drafts by ngram" in text
    assert "4 requests of 123 prompt tokens (mean), up to 7 output tokens; rounds: 3" in text
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "off", "1.8", "1.00", "0.25", "1.00", "identical"] in rows
    assert ["fixed", "2.8", "1.60", "0.40", "1.75", "1/4", "differ"] in rows
    assert ["1", "off", "1000/1000/1000", "500/500/500", "4.00/4.00/4.00"] in rows
    assert ["adaptive", "48", "3.00", "2.00", "1.00", "1.00", "0.00"] in rows


def test_tables_say_what_was_not_compared_or_is_lossy(report: Report) -> None:
    assert "sampled" in shown(changed(report, num_compared=0, num_different=0))
    assert "LOSSY" in shown(changed(report, is_lossless=False))


def test_missing_times_are_a_dash(report: Report) -> None:
    figures = replace(report.results[0].points[0].figures, inter_token_s=None)
    one_token = changed(report, figures=figures)
    assert "–" in shown(one_token)
    assert draw(one_token, "png").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file_format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_figure_comes_in_each_format(file_format: str, start: bytes, report: Report) -> None:
    assert draw(report, file_format).startswith(start)


def test_the_figure_names_what_it_shows(report: Report) -> None:
    figure = make_figure(report)
    text = texts(figure)
    for word in (
        *(
            "Tiny [llama], fp32, drafts by ngram",
            "a machine, 2 threads",
            "specexport 1.2.3",
            "up to 7 output tokens; rounds: 3",
        ),
        *("'a $file$.txt'", "off", "fixed", "adaptive", "requests at once"),
        *("Output tokens per second", "Acceptance per draft position", "position in the draft"),
        *("Time to first token, milliseconds", "Time between tokens, milliseconds"),
        *("2.00×", "fixed: of 4.0 drafted tokens 1.0 are accepted"),
    ):
        assert word in text, word


def test_the_figure_shows_the_medians(report: Report) -> None:
    speed, acceptance, first, _ = make_figure(report).axes
    off, fixed, _ = (values(line) for line in speed.lines)
    assert off == pytest.approx([7 / 4, 33 / 9.5])
    assert fixed == pytest.approx([7 / 2.5, 30 / 5.5])
    assert values(acceptance.lines[0]) == [1, 0, 0, 0]
    assert first.get_ylim()[0] == 0


def test_variants_under_one_load_stand_side_by_side(report: Report) -> None:
    speed = make_figure(replace(report, results=report.results[:1])).axes[0]
    places = [float(np.asarray(line.get_xdata())[0]) for line in speed.lines]
    assert places == sorted(set(places))
    assert sum(places) == pytest.approx(0)


def test_times_of_different_size_are_on_a_logarithmic_scale(report: Report) -> None:
    point: Point = report.results[0].points[0]
    figures = replace(point.figures, first_token_s=Percentiles(0.1, 1, 9))
    axes = make_figure(changed(report, figures=figures)).axes[2]
    assert axes.get_yscale() == "log"
    assert axes.get_title(loc="left") == "Time to first token, seconds"


def test_a_benchmark_that_drafted_nothing_says_so(report: Report) -> None:
    assert "nothing was drafted" in texts(make_figure(changed(report, drafting=Drafting())))
