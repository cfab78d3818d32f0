"""Plain decoding, fixed draft lengths and adaptive ones, by the number of requests at once.

Several requests wait for each slot, so that all are busy. The variants take turns in one process;
what is compared is their speed in the same round, of which the median over all rounds counts.
Prompts come from the prefix cache after an unmeasured round: it is decoding that is compared.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.common import header, standard_library_prompts
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions, MethodName
from specexport.runtime.params import SamplingParams

_TURNS = 4
"""Requests for each slot."""


@dataclass(frozen=True)
class Variant:
    """One way to run the bundle."""

    name: str
    options: EngineOptions


def tokens_per_s(engine: Engine, prompts: list[str], num_tokens: int) -> float:
    """While all slots are busy: from the start until no request waits any more.

    The time until the last one ends would tell of the slowest request, not of throughput.
    """
    started, before = time.perf_counter(), engine.stats().num_output_tokens
    streams = [
        engine.submit_chat(
            [{"role": "user", "content": prompt}],
            SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        for prompt in prompts
    ]
    while (stats := engine.stats()).num_waiting:
        time.sleep(0.005)
    speed = (stats.num_output_tokens - before) / (time.perf_counter() - started)
    for stream in streams:
        stream.result()
    return speed


def variants(method: MethodName | None, ks: list[int], slots: int) -> list[Variant]:
    """Plain, each fixed K, adaptive."""

    def options(**values: object) -> EngineOptions:
        # All prompts of a round must stay known, with their drafter entries.
        sizes = {"max_slots": slots, "max_length": 1024, "prefix_cache_mb": 8192}
        return EngineOptions(verify_files=False, **sizes, **values)  # type: ignore[arg-type]

    fixed = [Variant(f"K={k}", options(method=method, num_speculative_tokens=k)) for k in ks]
    adaptive = Variant("adaptive", options(method=method, adaptive=True))
    return [Variant("plain", options(method="none")), *fixed, adaptive]


def measure(
    bundle: Path, ways: list[Variant], prompts: list[str], num_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens a second of each variant, round by round."""
    speeds: dict[str, list[float]] = {way.name: [] for way in ways}
    engines = [(way.name, Engine(bundle, way.options)) for way in ways]
    for number in range(rounds + 1):
        for name, engine in engines:
            speed = tokens_per_s(engine, prompts, num_tokens)
            if number:
                speeds[name].append(speed)
    for _, engine in engines:
        engine.close()
    return speeds


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> float:
    """Median over the rounds."""
    return median(a / b for a, b in zip(speeds[name], speeds[other], strict=True))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=Path("build/demo"))
@click.option("--method", type=click.Choice(["ngram", "suffix", "draft", "eagle3"]))
@click.option("--concurrency", multiple=True, type=int, default=(1, 2, 4, 8, 16), show_default=True)
@click.option("-k", "ks", multiple=True, type=int, default=(2, 4, 6), show_default=True)
@click.option("-n", "--num-tokens", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(
    bundle: Path,
    method: MethodName | None,
    concurrency: tuple[int, ...],
    ks: tuple[int, ...],
    num_tokens: int,
    rounds: int,
) -> None:
    """Compare ways of drafting with BUNDLE; tokens per second, and ratios to plain decoding."""
    print(header())
    for num_requests in concurrency:
        prompts = standard_library_prompts(_TURNS * num_requests)
        ways = variants(method, list(ks), num_requests)
        speeds = measure(bundle, ways, prompts, num_tokens, rounds)
        best = max(ways[:-1], key=lambda way: ratio(speeds, way.name, "plain")).name
        shown = "  ".join(f"{way.name} {ratio(speeds, way.name, 'plain'):.3f}" for way in ways[1:])
        print(
            f"{num_requests:3} at once: plain {median(speeds['plain']):6.1f} tokens/s; {shown}; "
            f"adaptive is {ratio(speeds, 'adaptive', best):.3f} of the best ({best})",
            flush=True,
        )


if __name__ == "__main__":
    main()
