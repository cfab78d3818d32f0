"""Plain decoding, every fixed draft length and adaptive lengths, by the number of requests at once.

The variants alternate over several rounds in one process; of each the best round counts.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.common import header, standard_library_prompts
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions, MethodName
from specexport.runtime.params import SamplingParams


@dataclass(frozen=True)
class Variant:
    """One way to run the bundle."""

    name: str
    options: EngineOptions


def tokens_per_s(engine: Engine, prompts: list[str], num_tokens: int) -> float:
    """All prompts at once, from the first to the last token."""
    started = time.perf_counter()
    streams = [
        engine.submit_chat(
            [{"role": "user", "content": prompt}],
            SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        for prompt in prompts
    ]
    total = sum(len(stream.result().token_ids) for stream in streams)
    return total / (time.perf_counter() - started)


def variants(method: MethodName | None, ks: list[int], slots: int) -> list[Variant]:
    """Plain, each fixed K, adaptive."""

    def options(**values: object) -> EngineOptions:
        return EngineOptions(max_slots=slots, verify_files=False, **values)  # type: ignore[arg-type]

    fixed = [Variant(f"K={k}", options(method=method, num_speculative_tokens=k)) for k in ks]
    adaptive = Variant("adaptive", options(method=method, adaptive=True))
    return [Variant("plain", options(method="none")), *fixed, adaptive]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=Path("build/demo"))
@click.option("--method", type=click.Choice(["ngram", "suffix", "draft", "eagle3"]))
@click.option("--concurrency", multiple=True, type=int, default=(1, 2, 4, 8, 16), show_default=True)
@click.option("-k", "ks", multiple=True, type=int, default=(2, 4, 6), show_default=True)
@click.option("-n", "--num-tokens", default=64, show_default=True)
@click.option("--rounds", default=3, show_default=True)
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
    prompts = standard_library_prompts(max(concurrency))
    for num_requests in concurrency:
        best: dict[str, float] = {}
        engines = [(v, Engine(bundle, v.options)) for v in variants(method, list(ks), num_requests)]
        for _ in range(rounds):
            for variant, engine in engines:
                speed = tokens_per_s(engine, prompts[:num_requests], num_tokens)
                best[variant.name] = max(best.get(variant.name, 0.0), speed)
        for _, engine in engines:
            engine.close()
        fastest = max(speed for name, speed in best.items() if name != "adaptive")
        shown = "  ".join(f"{name} {best[name] / best['plain']:.2f}" for name in best)
        print(
            f"{num_requests:3} at once: plain {best['plain']:6.1f} tokens/s; {shown}; "
            f"adaptive is {best['adaptive'] / fastest:.2f} of the best"
        )


if __name__ == "__main__":
    main()
