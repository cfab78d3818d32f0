"""A training as people watch it: a bar and the last looks on a terminal, else a line a look."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specexport.training.loop import Watch
from specexport.training.progress import Point, Progress

_SHOWN = 12
"""Looks that fit on a screen."""


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """A `Watch` that draws on `console`."""
    if not console.is_terminal:
        yield _LineWatch(console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield lambda progress: live.update(_screen(progress))


class _LineWatch:
    def __init__(self, console: Console) -> None:
        self._console, self._num_points = console, 0

    def __call__(self, progress: Progress) -> None:
        if len(progress.points) > self._num_points:
            self._num_points = len(progress.points)
            self._console.print(_line(progress.points[-1], progress.total_steps), soft_wrap=True)


def _line(point: Point, total_steps: int | None) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in point.rates)
    loss = "" if point.loss is None else f"loss {point.loss:.3f}, "
    return (
        f"step {point.step}/{total_steps or '?'}, {point.elapsed_s:.0f} s: {loss}"
        f"held out {point.held_out_loss:.3f}, acceptance {rates}, length {point.length:.2f}"
    )


def _screen(progress: Progress) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    depth = max((len(point.rates) for point in progress.points), default=0)
    positions = (f"position {i + 1}" for i in range(depth))
    for name in ("step", "loss", "held out", *positions, "length"):
        table.add_column(name, justify="right")
    for point in progress.points[-_SHOWN:]:
        loss = "" if point.loss is None else f"{point.loss:.3f}"
        rates = (f"{rate:.2f}" for rate in point.rates)
        best = "  best" if point == progress.best else ""
        table.add_row(
            str(point.step), loss, f"{point.held_out_loss:.3f}", *rates, f"{point.length:.2f}{best}"
        )
    return Group(table, ProgressBar(progress.total_steps, progress.step), Text(_pace(progress)))


def _pace(progress: Progress) -> str:
    if not progress.step or not progress.elapsed_s:
        return "Looking at the held-out texts"
    speed = progress.num_tokens / progress.elapsed_s
    loss = f"loss {progress.loss_sum / progress.loss_count:.3f}, " if progress.loss_count else ""
    steps = f"step {progress.step}"
    if progress.total_steps:
        left = (progress.total_steps - progress.step) * progress.elapsed_s / progress.step
        steps += f" of {progress.total_steps}, {left / 60:.1f} minutes left"
    return f"{steps}, {loss}{speed:.0f} answer tokens/s"
