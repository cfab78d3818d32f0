"""A training as a figure. Only this module imports matplotlib."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specexport.training.report import TrainReport

_DARK, _GREY, _LIGHT = "#222222", "#6A6A6A", "#E4E4E4"
# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(report: TrainReport) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    make_figure(report).savefig(buffer, format="png")
    return buffer.getvalue()


def make_figure(report: TrainReport) -> Figure:
    """Two panels over the steps: losses, and acceptance on held-out texts by draft position."""
    figure = Figure(figsize=(11.5, 4.8), dpi=150, facecolor="white")
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.87, top=0.78, bottom=0.12, wspace=0.2)
    steps = [point.step for point in report.points]
    _dress(left, "Cross entropy with the target", "training: all draft positions; held out: first")
    seen = [(point.step, point.loss) for point in report.points if point.loss is not None]
    _line(left, [step for step, _ in seen], [loss for _, loss in seen], 0, "training")
    _line(left, steps, [point.held_out_loss for point in report.points], 1, "held out")
    left.legend(frameon=False, labelcolor=_DARK)
    _dress(right, "Acceptance per draft position", "held-out texts; those right before it")
    for i, rates in enumerate(zip(*(point.rates for point in report.points), strict=True)):
        _line(right, steps, rates, i, f"position {i + 1}")
    right.axvline(report.best_step, color=_GREY, linewidth=1, linestyle=":")
    right.set_ylim(0, 1)
    right.legend(frameon=False, labelcolor=_DARK, loc="center left", bbox_to_anchor=(1, 0.5))
    _write_around(figure, report)
    return figure


def _write_around(figure: Figure, report: TrainReport) -> None:
    options = report.options
    figure.text(
        0.02,
        0.93,
        f"{options.method}, {report.num_parameters / 1e6:.1f}M parameters",
        fontsize=14,
        fontweight="bold",
        color=_DARK,
    )
    told = (
        f"{report.num_tokens_seen:,} answer tokens in {report.elapsed_s / 60:.1f} minutes, "
        f"vocabulary of {report.draft_vocab_size:,}; on all held-out texts "
        f"{report.acceptance_length:.2f} tokens a step (step {report.best_step}, dotted)"
    )
    figure.text(0.02, 0.885, told, fontsize=9, color=_GREY, parse_math=False)


def _dress(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(f"{title}\n", loc="left", fontsize=11, color=_DARK)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=8, color=_GREY)
    axes.set_xlabel("step", color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line(
    axes: Axes, steps: Sequence[int], values: Sequence[float], number: int, label: str
) -> None:
    colour = _COLOURS[number % len(_COLOURS)]
    axes.plot(steps, values, color=colour, marker="o", markersize=4, linewidth=1.8, label=label)
