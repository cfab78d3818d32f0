"""Plain and speculative decoding against transformers' generate, in one run, alternating.

Prints tokens per second (best of the rounds), ratios, and the share of the runtime's own time.
"""

from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common import header
from specexport.runtime.engine import Engine
from specexport.runtime.options import EngineOptions, MethodName
from specexport.runtime.params import SamplingParams

_PARAGRAPH = (
    "The ferry leaves the old harbour at seven in the morning and reaches the island of "
    "Saint Brendan at half past nine. On the way it passes the lighthouse, two fishing villages "
    "and a sandbank where seals rest at low tide. Tickets cost twelve euros for adults and five "
    "euros for children; bicycles travel free of charge. The last ferry back leaves at six."
)
PROMPTS = {
    "copy": f"Repeat the following text exactly, word for word:\n\n{_PARAGRAPH}",
    "code": "Write a Python function that checks whether a string is a palindrome, ignoring case "
    "and punctuation. Then write three tests for it.",
    "prose": "Describe in about a hundred words how a steam engine works.",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    tokens_per_s: float
    acceptance_length: float
    overhead: float
    """The runtime's own time as a share of all."""
    token_ids: tuple[int, ...]


def measure(engine: Engine, prompt: list[int], num_tokens: int) -> Measured:
    """One greedy run of one request."""
    before = engine.stats()
    result = engine.submit(prompt, SamplingParams(max_tokens=num_tokens)).result()
    after = engine.stats()
    overhead = after.overhead_time_s - before.overhead_time_s
    total = after.total_time_s - before.total_time_s
    return Measured(
        result.stats.tokens_per_s(len(result.token_ids)),
        result.stats.acceptance.length,
        overhead / total,
        result.token_ids,
    )


def measure_transformers(checkpoint: str, prompt: list[int], num_tokens: int, rounds: int) -> float:
    """Tokens per second of transformers' greedy generate in fp32, best of `rounds`."""
    import time

    from specexport.validation.reference import Reference

    reference = Reference(checkpoint)
    best = 0.0
    for _ in range(rounds):
        started = time.perf_counter()
        reference.greedy(prompt, 1, ())
        first_token_s = time.perf_counter() - started
        output = reference.greedy(prompt, num_tokens, ())
        elapsed_s = time.perf_counter() - started - 2 * first_token_s  # decoding alone
        best = max(best, (len(output) - 1) / elapsed_s)
    return best


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=Path("build/demo"))
@click.option("-n", "--num-tokens", default=96)
@click.option("--rounds", default=3)
@click.option("-k", "--num-speculative-tokens", type=int)
@click.option("--transformers/--no-transformers", "with_transformers", default=True)
def main(
    bundle: Path,
    num_tokens: int,
    rounds: int,
    num_speculative_tokens: int | None,
    with_transformers: bool,
) -> None:
    """Measure BUNDLE on a copy-heavy, a code and a prose prompt."""
    methods: tuple[MethodName | None, ...] = ("none", None)
    engines = {
        method: Engine(
            bundle,
            EngineOptions(
                max_slots=1,
                method=method,
                adaptive=False,
                num_speculative_tokens=None if method else num_speculative_tokens,
            ),
        )
        for method in methods
    }
    table = Table(title=header("torch", "transformers"), title_justify="left")
    for heading in (
        "prompt",
        "plain",
        "speculative",
        "ratio",
        "acceptance length",
        "own time",
        "transformers",
        "plain / transformers",
    ):
        table.add_column(heading)
    for name, text in PROMPTS.items():
        prompt = engines["none"].tokenizer.encode_chat([{"role": "user", "content": text}])
        runs: dict[MethodName | None, list[Measured]] = {method: [] for method in methods}
        for _ in range(rounds):
            for method, engine in engines.items():
                runs[method].append(measure(engine, prompt, num_tokens))
        best = {m: max(run.tokens_per_s for run in found) for m, found in runs.items()}
        overheads = [min(run.overhead for run in found) for found in runs.values()]
        reference = 0.0
        if with_transformers:
            source = engines["none"].manifest.provenance.checkpoint
            reference = measure_transformers(source, prompt, num_tokens, rounds)
        same = runs["none"][0].token_ids == runs[None][0].token_ids
        table.add_row(
            name,
            f"{best['none']:.1f}",
            f"{best[None]:.1f}" + ("" if same else " (other tokens!)"),
            f"{best[None] / best['none']:.2f}",
            f"{runs[None][0].acceptance_length:.2f}",
            " / ".join(f"{share:.1%}" for share in overheads),
            f"{reference:.1f}" if reference else "–",
            f"{best['none'] / reference:.2f}" if reference else "–",
        )
    Console(width=140, highlight=False).print(table)


if __name__ == "__main__":
    main()
