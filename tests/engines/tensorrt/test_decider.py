"""Decisions on the device: the plan of a decide graph reads the logits where they lie.

The graph here is a small one with the inputs and outputs of a decide graph; what it computes says
which of them reached it.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from specexport.engines.cuda import Cuda
from specexport.engines.ort import OrtRunner
from specexport.engines.step import DecideInput, DecideOutput, Profile, StepInput
from specexport.engines.tensorrt.file import PlanFile
from specexport.engines.tensorrt.runner import DecidePlan, TensorRTRunner
from specexport.export.engine_spec import Backend, PlanSpec, ShapeProfile, SizeRange
from specexport.export.manifest import TensorSpec, hash_file
from specexport.export.tensorrt.plan import PlanOptions
from specexport.runtime.batch import Batch, Row
from tests.fake_gpu import FakeMachine
from tests.fake_tensorrt import fake_build
from tests.linked import linked
from tests.tiny import VOCAB_SIZE

PROFILE = Profile(max_slots=3, max_length=100, max_query=32, max_nodes=4)
SHAPES: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "proposed_prob", "accept_uniform"), ("N",)),
    **dict.fromkeys(("top_k", "proposed_id"), ("N",)),
    **dict.fromkeys(("adjusted_bias", "adjusted_repetition", "adjusted_penalty"), ("N", "P")),
    "adjusted_ids": ("N", "P"),
    "block_times": ("N", 5),
    "token_times": ("N", 64),
    "proposal_ids": ("N", "S"),
    "proposal_probs": ("N", "S"),
    **dict.fromkeys(("node_rows", "node_ids", "node_parents"), ("R", "M")),
    "ancestors": ("R", "M", "M"),
}
INTEGERS = (
    "top_k", "adjusted_ids", "proposed_id", "proposal_ids", "node_rows", "node_ids", "node_parents",
)  # fmt: skip
RANGES = {
    "N": SizeRange(min=1, opt=15, max=15),
    "P": SizeRange(min=1, opt=1, max=40),
    "S": SizeRange(min=1, opt=1, max=40),
    "R": SizeRange(min=1, opt=3, max=3),
    "M": SizeRange(min=1, opt=5, max=5),
}
OUTPUTS: dict[str, tuple[str, ...]] = {
    "is_decided": ("R",), "num_accepted": ("R",), "path": ("R", "M"), "token_ids": ("R", "M"),
    "logprobs": ("R", "M"),
}  # fmt: skip


def _type(name: str) -> int:
    if name in ("ancestors", "is_decided"):
        return int(TensorProto.BOOL)
    integers = (*INTEGERS, "num_accepted", "path", "token_ids")
    return int(TensorProto.INT64 if name in integers else TensorProto.FLOAT)


def _graph() -> onnx.ModelProto:
    """token_ids: the likeliest of each place's row; logprobs: its logit and the sum of the rest."""
    nodes = []
    sums = []
    for name in SHAPES:
        nodes += [
            helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", [f"{name}.float"], [f"{name}.sum"], keepdims=0),
        ]
        sums.append(f"{name}.sum")
    nodes += [
        helper.make_node("Sum", sums, ["all"]),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0),
        helper.make_node("Gather", ["best", "node_rows"], ["token_ids"]),
        helper.make_node("ReduceMax", ["logits", "one"], ["most"], keepdims=0),
        helper.make_node("Gather", ["most", "node_rows"], ["most.rows"]),
        helper.make_node("Add", ["most.rows", "all"], ["logprobs"]),
        helper.make_node("Identity", ["node_parents"], ["path"]),
        helper.make_node("ReduceSum", ["node_ids", "one"], ["num_accepted"], keepdims=0),
        helper.make_node("Greater", ["num_accepted", "zero"], ["is_decided"]),
    ]
    constants = [
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        helper.make_tensor("zero", TensorProto.INT64, [], [0]),
    ]
    inputs = {"logits": ("N", VOCAB_SIZE), **SHAPES}
    graph = helper.make_graph(
        nodes,
        "decide",
        [helper.make_tensor_value_info(name, _type(name), shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(n, _type(n), shape) for n, shape in OUTPUTS.items()],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _decide_plan(machine: FakeMachine, target: PlanFile, folder: Path) -> DecidePlan:
    profile = ShapeProfile(name="step", sizes=RANGES)
    model = ir.from_proto(_graph())
    built = fake_build(None, model, folder / "decide.onnx", PlanOptions(("sm89",), (profile,)))
    path = folder / "decide.plan"
    path.write_bytes(built.data)
    found = hash_file(path)
    changes = {"path": path.name, "size_bytes": found.size_bytes, "sha256": found.sha256}
    plan: PlanSpec = target.plan.model_copy(
        update={**changes, "cache_length": 0, "profiles": (profile,)}
    )
    names = {int(TensorProto.BOOL): "bool", int(TensorProto.INT64): "int64", 1: "float32"}
    shapes = {"logits": ("N", VOCAB_SIZE), **SHAPES, **OUTPUTS}
    tensors = tuple(
        TensorSpec(name=name, dtype=names[_type(name)], shape=shape)
        for name, shape in shapes.items()
    )
    return DecidePlan(PlanFile(machine.library, folder, target.engine, plan), tensors)


def _decide_input(num_rows: int, num_adjusted: int = 1, seed: int = 0) -> DecideInput:
    rng = np.random.default_rng(seed)
    sizes = {"N": num_rows, "P": num_adjusted, "S": 2, "R": 2, "M": 3}
    values: dict[str, Any] = {}
    for name, dims in SHAPES.items():
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
        kind: dict[int, Any] = {TensorProto.BOOL: np.bool_, TensorProto.INT64: np.int64}
        values[name] = rng.integers(0, num_rows, shape).astype(kind.get(_type(name), np.float32))
    return DecideInput(**values)


def _expected(logits: Any, decide: DecideInput) -> dict[str, Any]:
    total = sum(float(getattr(decide, field.name).sum()) for field in fields(decide))
    accepted = decide.node_ids.sum(axis=1)
    return {
        "is_decided": accepted > 0,
        "num_accepted": accepted,
        "path": decide.node_parents,
        "token_ids": logits.argmax(axis=1)[decide.node_rows],
        "logprobs": logits.max(axis=1)[decide.node_rows] + total,
    }


def _assert_decided(found: DecideOutput | None, expected: dict[str, Any]) -> None:
    assert found is not None
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-5)


@pytest.fixture(params=get_args(Backend))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine.install(monkeypatch, request.param)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return linked(tiny_bundle, tmp_path / "bundle")


@pytest.fixture
def runner(machine: FakeMachine, bundle: Path, tmp_path: Path) -> Iterator[TensorRTRunner]:
    manifest = machine.add_plans(bundle)
    engine = manifest.engines[0]
    file = PlanFile(machine.library, bundle, engine, engine.plans["target"])
    decide = _decide_plan(machine, file, tmp_path)
    with TensorRTRunner(Cuda(), file, manifest.target, PROFILE, decide) as runner:
        yield runner
    machine.assert_all_freed()


@pytest.fixture
def reference(runner: TensorRTRunner, bundle: Path) -> Iterator[OrtRunner]:
    with OrtRunner(bundle / runner.spec.path, runner.spec, PROFILE) as reference:
        yield reference


def _step(start: int, num_logits: int = 2) -> StepInput:
    tokens = list(range(start + 1, start + 4))
    return Batch.build([Row(start, tokens, num_logits), Row(start, tokens[:2], 2)], 100).step


def test_decisions_are_those_of_the_graph_on_the_steps_logits(
    runner: TensorRTRunner, reference: OrtRunner
) -> None:
    assert runner.can_decide
    for i in range(8):
        step = _step(i, 2 + i % 2)
        decide = _decide_input(len(step.logits_indices), seed=i)
        logits = reference.run(step).logits
        output = runner.run(replace(step, decide=decide))
        assert output.logits.shape == (0, VOCAB_SIZE)
        _assert_decided(output.decided, _expected(logits, decide))
        np.testing.assert_allclose(runner.read_logits(), logits, atol=1e-5)


def test_a_step_that_is_decided_copies_no_logits_and_waits_once(
    machine: FakeMachine, runner: TensorRTRunner
) -> None:
    step = _step(0)
    decide = _decide_input(len(step.logits_indices))
    runner.run(replace(step, decide=decide))  # two tokens of a proposal are more than usual
    for _ in range(4):
        machine.cuda.calls.clear()
        runner.run(replace(step, decide=decide))
        calls = machine.cuda.calls
        assert calls.count("cudaStreamSynchronize") == 1
        assert calls.count("cudaMemcpyAsync") == 5 + len(SHAPES) + len(OUTPUTS)
        assert "cudaMalloc" not in calls


def test_a_step_that_asks_for_no_decision_gives_logits(
    runner: TensorRTRunner, reference: OrtRunner
) -> None:
    expected = reference.run(_step(0)).logits
    output = runner.run(_step(0))
    assert output.decided is None
    np.testing.assert_allclose(output.logits, expected, atol=1e-5)


def test_what_the_plan_was_not_built_for_is_left_to_the_host(
    runner: TensorRTRunner, reference: OrtRunner
) -> None:
    step = _step(0)
    decide = _decide_input(len(step.logits_indices), num_adjusted=41)
    output = runner.run(replace(step, decide=decide))
    assert output.decided is None
    np.testing.assert_allclose(output.logits, reference.run(step).logits, atol=1e-5)


def test_unusual_decisions_make_room_and_the_usual_ones_go_on(
    runner: TensorRTRunner, reference: OrtRunner
) -> None:
    for i, num_adjusted in enumerate((1, 1, 40, 1, 7, 40, 1)):
        num_logits = 20 if i == 4 else 2  # the logits move, too
        tokens = list(range(20))
        step = Batch.build([Row(i, tokens, num_logits)], 100).step
        decide = _decide_input(len(step.logits_indices), num_adjusted, seed=i)
        logits = reference.run(step).logits
        output = runner.run(replace(step, decide=decide))
        if i == 4:  # more rows than the decide plan takes
            assert output.decided is None
            np.testing.assert_allclose(output.logits, logits, atol=1e-5)
        else:
            _assert_decided(output.decided, _expected(logits, decide))
