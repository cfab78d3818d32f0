"""What came of a load: the variants' figures, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specexport.bench.figures import Drafting, Figures, measure
from specexport.bench.load import Load, Run


@dataclass(frozen=True, slots=True)
class Measured:
    """What is kept of a run."""

    figures: Figures
    drafting: Drafting
    greedy_outputs: tuple[tuple[int, ...], ...]
    """Token ids of the requests at temperature 0: others need not come out the same."""
    is_lossless: bool

    @classmethod
    def of(cls, run: Run, *, is_lossless: bool) -> "Measured":
        """Of a run on an engine that is lossless or not."""
        outputs = tuple(
            trace.completion.token_ids for trace in run.traces if trace.job.params.temperature == 0
        )
        return cls(measure(run), Drafting.of(run.traces), outputs, is_lossless)


@dataclass(frozen=True, slots=True)
class Point:
    """A variant under a load, over all rounds."""

    variant: str
    figures: Figures
    """Medians over the rounds."""
    rounds: tuple[Figures, ...]
    speedup: float
    """Tokens per second / the first variant's in the same round; the median over the rounds."""
    drafting: Drafting
    num_compared: int
    num_different: int
    """Greedy requests whose output was not the first variant's, in some round."""
    is_lossless: bool

    @classmethod
    def of(cls, variant: str, own: Sequence[Measured], first: Sequence[Measured]) -> "Point":
        """Compare a variant's rounds with the first variant's."""
        pairs = list(zip(own, first, strict=True))
        different = {
            index
            for one, other in pairs
            for index, outputs in enumerate(
                zip(one.greedy_outputs, other.greedy_outputs, strict=True)
            )
            if outputs[0] != outputs[1]
        }
        rounds = tuple(one.figures for one in own)
        return cls(
            variant,
            Figures.median(rounds),
            rounds,
            median(a.figures.tokens_per_s / b.figures.tokens_per_s for a, b in pairs),
            Drafting.sum([one.drafting for one in own]),
            len(own[0].greedy_outputs),
            len(different),
            all(one.is_lossless for one in own),
        )


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All variants under a load, in their order."""

    load: Load
    points: tuple[Point, ...]

    @classmethod
    def of(
        cls, load: Load, variants: Sequence[str], rounds: Sequence[Sequence[Measured]]
    ) -> "LoadResult":
        """`rounds[i][j]` is variant j in round i; the first variant is compared with."""
        columns = list(zip(*rounds, strict=True))
        points = [
            Point.of(name, column, columns[0])
            for name, column in zip(variants, columns, strict=True)
        ]
        return cls(load, tuple(points))


def drafting_by_variant(results: Sequence[LoadResult]) -> dict[str, Drafting]:
    """How each variant's drafts fared under all loads together."""
    parts: dict[str, list[Drafting]] = {}
    for result in results:
        for point in result.points:
            parts.setdefault(point.variant, []).append(point.drafting)
    return {variant: Drafting.sum(found) for variant, found in parts.items()}
