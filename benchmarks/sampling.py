"""What a request's options cost for each position that is verified, beside a step of the model.

Usage: python -m benchmarks.sampling [--vocab-size 151936] [--rounds 200]
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core

import numpy as np

from benchmarks.common import header
from specexport.runtime.logprobs import raw_logprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.processing import LogitsProcessor

_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
}
_CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": _PENALTIES,
    "greedy, logit_bias": {"logit_bias": {5: 1.0, 9: -2.0}},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "typical_p 0.95": {"temperature": 0.8, "typical_p": 0.95},
    "top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top_k 50, top_p 0.95, penalties": {
        **{"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        **_PENALTIES,
    },
    "top_p 0.95, penalties": {"temperature": 0.8, "top_p": 0.95, **_PENALTIES},
    "allowed_token_ids (1000)": {"temperature": 0.8, "allowed_token_ids": range(1000)},
}
_NUM_PROMPT, _NUM_OUTPUT, _DEPTH = 2000, 500, 4


def main() -> None:
    """Print a table of milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    # Spread like a language model's: most probability on few tokens, a long flat tail.
    rows = rng.gumbel(0, 2.5, (8, arguments.vocab_size)).astype(np.float32)
    prompt = rng.integers(0, arguments.vocab_size, _NUM_PROMPT).tolist()
    output = rng.integers(0, arguments.vocab_size, _NUM_OUTPUT).tolist()
    print(header())
    print(
        f"one row of {arguments.vocab_size} logits, one core; prompt {_NUM_PROMPT} tokens, output "
        f"{_NUM_OUTPUT}, {_DEPTH} drafted tokens above; median of {arguments.rounds}\n"
    )
    for name, options in _CASES.items():
        processor = LogitsProcessor(SamplingParams(seed=0, **options), prompt)
        processor.commit(output)
        path = output[:_DEPTH]
        report(name, rows, arguments.rounds, lambda row: processor.distribution(row, path))  # noqa: B023
    report("raw logprobs, top 5", rows, arguments.rounds, lambda row: raw_logprobs(row, 3, 5))


def report(
    name: str, rows: np.ndarray[Any, Any], rounds: int, call: Callable[[Any], object]
) -> None:
    """Time `call` on the rows in turn."""
    times = []
    for i in range(rounds):
        started = time.perf_counter()
        call(rows[i % len(rows)])
        times.append(time.perf_counter() - started)
    print(f"{name:<34}{1e3 * float(np.median(times)):8.3f} ms")


if __name__ == "__main__":
    main()
