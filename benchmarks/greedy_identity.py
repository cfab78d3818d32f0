"""Greedy output with speculation against without, on real prompts, for every K.

Prints how many outputs are identical and, of those that are not, where they part.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.common import header, standard_library_prompts
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions, MethodName
from specexport.runtime.params import SamplingParams


def outputs(
    bundle: Path, prompts: Sequence[str], num_tokens: int, options: EngineOptions
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Greedy outputs and the acceptance rate at each position."""
    with Engine(bundle, options) as engine:
        streams = [
            engine.submit_chat(
                [{"role": "user", "content": p}], SamplingParams(max_tokens=num_tokens)
            )
            for p in prompts
        ]
        found = [stream.result().token_ids for stream in streams]
        return found, engine.stats().acceptance.rate_per_position


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Where two sequences part."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=Path("build/demo"))
@click.option("--num-prompts", default=104)
@click.option("-n", "--num-tokens", default=32)
@click.option("--slots", default=8)
@click.option("--method", "methods", multiple=True, type=click.Choice(["ngram", "suffix", "draft"]))
@click.option("-k", "ks", multiple=True, type=int, help="Draft lengths  [default: 1 to 8].")
def main(
    bundle: Path,
    num_prompts: int,
    num_tokens: int,
    slots: int,
    methods: tuple[MethodName, ...],
    ks: tuple[int, ...],
) -> None:
    """Compare BUNDLE's plain and speculative greedy outputs."""
    print(header())
    prompts = standard_library_prompts(num_prompts)
    plain, _ = outputs(bundle, prompts, num_tokens, EngineOptions(max_slots=slots, method="none"))
    print(f"{num_prompts} prompts, {sum(map(len, plain))} tokens")
    for method in methods or ("ngram",):
        for k in ks or range(1, 9):
            options = EngineOptions(max_slots=slots, method=method, num_speculative_tokens=k)
            started = time.perf_counter()
            found, rates = outputs(bundle, prompts, num_tokens, options)
            elapsed_s = time.perf_counter() - started
            parted = [i for i in range(num_prompts) if found[i] != plain[i]]
            shown = " ".join(f"{rate:.2f}" for rate in rates)
            print(
                f"{method} K={k}: {num_prompts - len(parted)} of {num_prompts} identical, "
                f"acceptance per position {shown} ({elapsed_s:.0f} s)",
                flush=True,
            )
            for i in parted:
                print(f"  prompt {i} parts at token {first_difference(found[i], plain[i])}")


if __name__ == "__main__":
    main()
