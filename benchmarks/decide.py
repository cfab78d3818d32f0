"""The decide graph on ONNX Runtime beside the host's NumPy, for the rows of one step, in turns.

Usage: python -m benchmarks.decide [--vocab-size 151936] [--rounds 50] [--nodes 4]

The graph's time holds what the host prepares for it; both begin with logits and drafts, and end
with the tokens.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import header
from specexport.runtime.draft import Draft
from specexport.runtime.params import SamplingParams
from tests.decide_tools import Case, drawn_chain, in_graph

_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top_k 50, top_p 0.95, penalties": {
        **{"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        **{"repetition_penalty": 1.1, "frequency_penalty": 0.4},
    },
}


def main() -> None:
    """Print a table of milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=4, help="drafted tokens of the longer step")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    # Spread like a language model's: most probability on few tokens, a long flat tail.
    size = (arguments.nodes + 1, arguments.vocab_size)
    logits = rng.gumbel(0, 2.5, size).astype(np.float32)
    text = rng.integers(0, arguments.vocab_size, 500).tolist()
    print(header())
    print(f"{arguments.vocab_size} logits a row, one core; median of {arguments.rounds}\n")
    print(f"{'options':<34}{'draft':<22}{'graph ms':>10}{'NumPy ms':>10}  same tokens")
    for name, options in _OPTIONS.items():
        params = SamplingParams(seed=0, **options)
        for kind, draft in _drafts(logits, params, arguments.nodes, len(text)).items():
            case = Case.of(params, draft, logits[: len(draft) + 1], text)
            report(f"{name:<34}{kind:<22}", case, arguments.rounds)


def _drafts(
    logits: NDArray[np.float32],  # [1 + nodes, V]
    params: SamplingParams,
    num_nodes: int,
    position: int,
) -> dict[str, Draft]:
    """None, one whose tokens are all accepted, and one that a drafter of its own drew."""
    plain = [
        Case.of(params, Draft(), logits[i : i + 1], [0] * (position + i), num_prompt=position)
        for i in range(num_nodes)
    ]
    drafts = {
        "none": Draft(),
        f"certain, {num_nodes}": Draft.certain([case.on_host().token_ids[0] for case in plain]),
    }
    if params.temperature:
        drafts[f"drawn, {num_nodes}"] = drawn_chain(logits, params, num_nodes, position)
    return drafts


def report(name: str, case: Case, rounds: int) -> None:
    """Time both on the same step, one after the other."""
    (decided,), verdict = in_graph([case]), case.on_host()
    same = "left to the host" if decided is None else str(decided.verdict == verdict)
    calls: tuple[Callable[[], object], ...] = (lambda: in_graph([case]), case.on_host)
    times = np.array([[_seconds(call) for call in calls] for _ in range(rounds)])
    graph, host = 1e3 * np.median(times, axis=0)
    print(f"{name}{graph:10.3f}{host:10.3f}  {same}")


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
