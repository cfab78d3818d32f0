"""A graph on two engines, the same inputs: every output compared by Polygraphy's comparator."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from specexport.engines.step import FunctionRunner, StepRunner
from specexport.export.engine_spec import FloatType
from specexport.export.manifest import FunctionSpec, GraphSpec
from specexport.runtime.batch import Batch, Row
from specexport.validation.report import OutputReport

Arrays = dict[str, NDArray[Any]]
Infer = Callable[[Arrays], Arrays]
"""All outputs for all inputs."""

# Of an output's largest number. fp16, and fp32 products that TensorRT rounds to TF32, keep 11 bits:
# half a unit is 0.0005, bf16's with 8 bits 0.004. Errors of some tens of layers add up to 20 to 40
# times that. fp32 differs only in the order of its sums.
TOLERANCES: dict[FloatType, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}
# Query tokens of the steps that a text goes through: prompts, single tokens and drafts.
_CHUNKS = (9, 1, 5, 1, 32)


class EngineRunner(BaseRunner):  # type: ignore[misc] # polygraphy has no types
    """One graph on one engine, for Polygraphy."""

    def __init__(self, name: str, infer: Infer, example: Arrays) -> None:
        super().__init__(name=name)
        self._infer, self._example = infer, example

    def get_input_metadata_impl(self) -> TensorMetadata:
        """What every feed has; Polygraphy leaves out all else."""
        metadata = TensorMetadata()
        for name, array in self._example.items():
            metadata.add(name, dtype=array.dtype, shape=(-1, *array.shape[1:]))
        return metadata

    def infer_impl(self, feed_dict: Arrays) -> Arrays:
        """All outputs for all inputs."""
        started = time.perf_counter()
        outputs = self._infer(feed_dict)
        self.inference_time = time.perf_counter() - started
        return outputs


def step_outputs(runner: StepRunner, feed: Arrays) -> Arrays:
    """A text in steps of several lengths: logits [T, V], states, and the cache that is left."""
    ids, states = [int(i) for i in feed["input_ids"]], feed.get("hidden_states")
    found: dict[str, list[NDArray[np.float32]]] = {"logits": [], "hidden_states": []}
    start = turn = 0
    while start < len(ids):
        stop = start + min(_CHUNKS[turn % len(_CHUNKS)], runner.profile.max_query)
        tokens = ids[start:stop]
        given = None if states is None else states[start:stop]
        row = Row(start, tokens, len(tokens), hidden_states=given)
        batch = Batch.build([row], runner.profile.max_length, runner.spec.sliding_window)
        output = runner.run(batch.step)
        found["logits"].append(output.logits.copy())
        if output.hidden_states is not None:
            width = output.hidden_states.shape[-1]
            found["hidden_states"].append(output.hidden_states.reshape(-1, width).copy())
        start, turn = stop, turn + 1
    outputs = {name: np.concatenate(parts) for name, parts in found.items() if parts}
    return {**outputs, "cache": runner.read_cache(0, 0, len(ids))}


def function_outputs(runner: FunctionRunner, feed: Arrays) -> Arrays:
    """The one output of a graph without a cache."""
    return {"output": runner.run(feed["hidden_states"]).copy()}


def make_feeds(spec: GraphSpec | FunctionSpec, texts: Sequence[Sequence[int]]) -> list[Arrays]:
    """Texts of known tokens; hidden states, where the graph reads some, are random."""
    rng = np.random.default_rng(0)
    states = next((t for t in spec.inputs if t.name == "hidden_states"), None)
    feeds = []
    for text in texts:
        feed: dict[str, Any] = {}
        length = len(text)
        if isinstance(spec, GraphSpec):
            known = [i for i in text if i < spec.vocab_size or states][: spec.max_length]
            feed["input_ids"], length = np.array(known, dtype=np.int64), len(known)
        if states:
            feed["hidden_states"] = rng.normal(size=(length, states.width)).astype(np.float32)
        feeds.append(feed)
    return feeds


def compare_outputs(
    graph: str, right: Infer, other: Infer, feeds: Sequence[Arrays], tolerance: float
) -> list[OutputReport]:
    """Compare what `other` gives with what is right; one report for each output.

    The tolerance is relative to the largest number of an output.
    """
    worst: dict[str, float] = {}

    def compare(expected: Any, found: Any) -> "OrderedDict[str, bool]":  # noqa: ANN401
        verdicts = OrderedDict()
        for name in expected:
            difference = _relative_diff(expected[name], found[name])
            worst[name] = max(worst.get(name, 0.0), difference)
            verdicts[name] = difference <= tolerance
        return verdicts

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        named = {"ONNX Runtime on the CPU": right, "the engine": other}
        runners = [EngineRunner(name, infer, feeds[0]) for name, infer in named.items()]
        stream = Comparator.run(runners, data_loader=feeds, streaming=True)
        Comparator.compare_accuracy(stream, compare_func=compare)
    return [
        OutputReport(
            graph=graph,
            output=name,
            max_relative_diff=difference,
            tolerance=tolerance,
            passed=difference <= tolerance,
        )
        for name, difference in worst.items()
    ]


def _relative_diff(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Largest difference, of the largest number that was expected; infinite for NaN."""
    if expected.shape != found.shape or not np.isfinite(found).all():
        return float("inf")
    scale = np.abs(expected).max(initial=0) or 1.0
    return float(np.abs(expected - found).max(initial=0) / scale)
